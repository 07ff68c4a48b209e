"""An engine that computes step by step in its owner thread, while there is work."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from megarl.rollout.load import Loads
from megarl.rollout.owned_engine import OwnedEngine, by_owner
from megarl.rollout.protocol import Load, Request
from megarl.rollout.request_in_flight import Answer, Listener


class SteppingEngine(OwnedEngine):
    """Every step is a task in the owner's queue, and enqueues the next one behind waiting calls."""

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        super().__init__(model_path, engine_args)
        self._step_queued = False
        self._loads = Loads()

    @by_owner
    def load(self) -> Load | None:
        """See `Sampler.load`."""
        loads, self._loads = self._loads, Loads()
        return loads.together()

    # The methods below, too, run in the owner thread.

    @abstractmethod
    def _add_samples(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        """Accept requests as `_accept`, for later steps to compute."""

    @abstractmethod
    def _can_step(self) -> bool:
        """Whether there is work and nothing blocks it."""

    @abstractmethod
    def _compute(self) -> None:
        """Compute the next token of the requests in flight."""

    def _load_after_step(self) -> Load | None:
        """The load after a step; None if the engine does not know it."""
        return None

    def _accept(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        added = self._add_samples(requests, listener)
        self._queue_step()
        return added

    def _pause_stepping(self) -> None:
        """Do nothing: each step first checks whether it may begin."""

    def _resume_stepping(self) -> None:
        self._queue_step()

    def _queue_step(self) -> None:
        if self._can_step() and not self._step_queued:
            self._step_queued = True
            self._owner.submit(self._step).add_done_callback(self._die_of)

    def _step(self) -> None:
        self._step_queued = False
        # A call that ran in between may block the step.
        if self._can_step():
            with record_function("engine step"):
                self._compute()
            if (load := self._load_after_step()) is not None:
                self._loads.note(load)
            self._report_progress()
            self._queue_step()

    def _die_of(self, step: Future[None]) -> None:
        if (error := step.exception()) is not None:
            self._die(error)
