"""Errors that end a run from outside."""

import os

from converters.errors import UserError


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


class MachinesUnfit(UserError):  # noqa: N818 - says what is
    """Machines that are not as a run needs them: bad input where it is first started on them, see `exit_code_of`."""


def exit_code_of(error: UserError | RunFailed) -> int:
    """2 for bad input, and 1 for what may pass.

    A job of Slurm that was in the queue again had fit machines before, and may have them again: 2 would end it.
    """
    was_in_the_queue_again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    if isinstance(error, RunFailed) or (isinstance(error, MachinesUnfit) and was_in_the_queue_again):
        return 1
    return 2
