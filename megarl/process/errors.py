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


class MayPass(UserError):  # noqa: N818 - says what is
    """Bad input where a run is first started; where it has run before, that may pass. See `exit_code_of`."""

    has_run_before = False
    """Whether that is known of the run."""


class MachinesUnfit(MayPass):
    """Machines that are not as a run needs them."""


def exit_code_of(error: UserError | RunFailed) -> int:
    """2 for bad input, and 1 for what may pass.

    A run that had fit machines before may have them again, and so may a job of Slurm that was in the queue again, which
    may also meet the lock of its own lost machine: 2 would end what starts it again. Kubernetes and the scripts for
    Slurm do so a bounded number of times.
    """
    if isinstance(error, MayPass):
        was_in_the_queue_again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        return 1 if error.has_run_before or was_in_the_queue_again else 2
    return 1 if isinstance(error, RunFailed) else 2
