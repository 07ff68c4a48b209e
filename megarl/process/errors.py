"""Errors that end a run from outside."""


class RunFailed(Exception):  # noqa: N818 - says what happened
    """Something that neither the program nor its input is to blame for: a process that died, a machine without memory.

    A command prints it without a traceback and ends with exit code 1.
    """

    sentence: str
    """Says what happened, and what to do."""
    details: str
    """Text below the sentence, as it is: the end of a log."""
