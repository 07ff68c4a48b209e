"""The error that a user can act on."""


class UserError(Exception):
    """Bad input: one clear sentence that says what is wrong, where, and what to do.

    A command prints it without a traceback and ends with exit code 2.
    """
