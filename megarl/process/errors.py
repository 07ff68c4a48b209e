"""Errors that end a run from outside."""


class Resumable(Exception):  # noqa: N818 - says what happened
    """A failure that may pass: the run can be taken up again from its last checkpoint."""

    may_resume = True
    """Whether that is to be tried."""
    happened: str
    """The event, without what to do."""
    details: str
    """Text below the sentence, as it is: the end of a log."""


class RunFailed(Resumable):
    """Something that neither the program nor its input is to blame for: a process that died, a machine without memory.

    A command prints it without a traceback and ends with exit code 1.
    """

    sentence: str
    """Says what happened, and what to do."""
