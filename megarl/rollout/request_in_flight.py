"""Requests in flight: each until all its samples are there."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np

from megarl.data import Turn
from megarl.rollout.protocol import Request

Listener: TypeAlias = Callable[[list[int]], None]
"""Is told of the tokens that were sampled, as soon as they are."""


class RequestInFlight:
    """One request: its future is done when all its samples are."""

    def __init__(self, request: Request, listener: Listener | None = None) -> None:
        self.listener = listener
        # One array, which all samples share.
        self.prompt_ids = np.array(request.prompt_token_ids, dtype=np.int32)
        self.future: Future[list[Turn]] = Future()
        self._turns: list[Turn | None] = [None] * request.sampling.samples
        self._unfinished = request.sampling.samples

    def finish(self, sample: int, turn: Turn) -> None:
        """Note one sample, and complete the future with the last one."""
        self._turns[sample] = turn
        self._unfinished -= 1
        if self._unfinished == 0:
            self.future.set_result(self._turns)  # type: ignore[arg-type]
