"""Automatic resumption after a failure: from the last checkpoint, a bounded number of times."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from megarl.process.errors import MachinesUnfit, MayPass, Resumable, RunFailed
from megarl.process.logs import say
from megarl.run.checkpoints import checkpoints_folder
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint.checkpoint_folder import complete_iterations

MOST_IN_VAIN = 3
"""Failures in a row, without a new checkpoint between them, after which the run is given up."""


class TooManyFailures(RunFailed):
    """A run failed too often; carries a sentence for the user and the end of a log."""

    may_resume = False

    def __init__(self, sentence: str, details: str) -> None:
        super().__init__(sentence)
        self.sentence = self.happened = sentence
        self.details = details


def run_with_restarts(program: Callable[[MegarlConfig], None], config: MegarlConfig) -> None:
    """Run `program`, and run it again from its last checkpoint, or from the start, after a failure that may pass.

    Everything that a try has started ends with it. After `cluster.max_restarts` restarts, or `MOST_IN_VAIN` failures
    without a new checkpoint, raises TooManyFailures, or the failure itself if it is an error of the program.
    """
    failures = _Failures(config)
    while True:
        try:
            program(config)
        except Resumable as failure:
            if not failure.may_resume or config.cluster.max_restarts == 0:
                raise
            failures.add(failure)
        except MayPass as error:
            error.has_run_before = failures.has_any
            raise
        else:
            return
        # Nothing refers to the failed try any more and its processes are gone: free its memory, too.
        gc.collect()
        # The checkpoints are this run's own now, even if it was started with `never`.
        config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


@contextmanager
def machines_were_fit_with_a_checkpoint(config: MegarlConfig) -> Iterator[None]:
    """Mark a MachinesUnfit error raised inside as one of machines that were fit before, if the run has a checkpoint."""
    try:
        yield
    except MachinesUnfit as unfit:
        unfit.has_run_before = unfit.has_run_before or bool(complete_iterations(checkpoints_folder(config)))
        raise


class _Failures:
    """Counts the failures of a run, and decides whether it resumes."""

    def __init__(self, config: MegarlConfig) -> None:
        self._max_restarts, self._checkpoints = config.cluster.max_restarts, checkpoints_folder(config)
        self._restarts = self._in_vain = 0
        self._first: tuple[str, str] | None = None
        self._saved = complete_iterations(self._checkpoints)[-1:]

    @property
    def has_any(self) -> bool:
        """Whether any try has failed."""
        return self._first is not None

    def add(self, failure: Resumable) -> None:
        """Count a failure and print that the run resumes. Raises TooManyFailures, or the failure, if it does not."""
        self._first = self._first or (failure.happened, failure.details)
        saved = complete_iterations(self._checkpoints)[-1:]
        self._in_vain = self._in_vain + 1 if saved == self._saved else 1
        self._saved = saved
        if self._in_vain == MOST_IN_VAIN:
            row = f"the run failed {MOST_IN_VAIN} times in a row without a checkpoint between, the last time"
            self._give_up(failure, row, _sentence(failure), failure.details)
        if self._restarts == self._max_restarts:
            happened, details = self._first
            often = f"the run failed more often than cluster.max_restarts={self._max_restarts} allows, the last time"
            self._give_up(failure, often, f"{failure.happened}; the first time: {happened}", details)
        self._restarts += 1
        goes_on = f"goes on from the checkpoint of step {saved[0]}" if saved else "has no checkpoint and starts over"
        say(f"{failure.happened}; the run {goes_on} (restart {self._restarts} of {self._max_restarts})")
        print(failure.details, file=sys.stderr, flush=True)

    @staticmethod
    def _give_up(failure: Resumable, why: str, what: str, details: str) -> None:
        if isinstance(failure, RunFailed):
            raise TooManyFailures(f"{why}: {what}", details) from None
        failure.add_note(f"{why}: {what}")
        raise failure


def _sentence(failure: Resumable) -> str:
    return failure.sentence if isinstance(failure, RunFailed) else failure.happened
