"""Runs untrusted programs with limits and kernel isolation.

Nothing is imported here, as the supervisor's startup is part of every test of a program.
"""
