"""A job at its real size without its cluster: every distinct rank is built from the real modules, without memory.

Sizes are measured from the code that allocates, rather than computed by formulas, wherever possible.
"""
