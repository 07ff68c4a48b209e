"""Errors that end a run from outside."""

import os

from converters.errors import UserError


class Resumable(Exception):  # noqa: N818 - says what happened
    """A failure that may be temporary: the run can be resumed from its last checkpoint."""

    may_resume = True
    """Whether resuming is to be tried."""
    happened: str
    """The event, without advice."""
    details: str
    """Text printed verbatim below the sentence, such as the end of a log."""


class RunFailed(Resumable):
    """A failure that is neither the program's fault nor its input's, such as a killed process or a lack of memory.

    A command prints it without a traceback and exits with code 1.
    """

    sentence: str
    """One sentence: what happened, and what to do."""


class MayPass(UserError):  # noqa: N818 - says what is
    """Bad input on a run's first start; on later starts, a problem that may be temporary. See `exit_code_of`."""

    has_run_before = False
    """Whether the run is known to have started before."""


class MachinesUnfit(MayPass):
    """Machines that do not meet the run's requirements."""


def exit_code_of(error: UserError | RunFailed) -> int:
    """Return 2 for bad input, and 1 for a problem that may be temporary.

    Exit code 2 would stop whatever restarts the run. So a `MayPass` gives 1 if the run has started before: it may get
    fit machines again. It also gives 1 in a requeued Slurm job, which may still find the lock of its own lost machine.
    Kubernetes and the Slurm scripts limit the number of restarts.
    """
    if isinstance(error, MayPass):
        was_in_the_queue_again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        return 1 if error.has_run_before or was_in_the_queue_again else 2
    return 1 if isinstance(error, RunFailed) else 2
