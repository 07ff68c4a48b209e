"""A job at its real size without its cluster: every distinct rank is built of the real modules, with no memory behind.

Nothing here computes a size by a formula where the code that allocates it can be asked instead.
"""
