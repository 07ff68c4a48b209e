"""Running programs that nobody has read: limits, what the kernel isolates, and what it does not.

Nothing is imported here: the supervisor's start is part of every test of a program.
"""
