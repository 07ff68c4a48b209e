"""Requests in flight: each until all its samples are there."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from megarl.data import Turn
from megarl.data.trajectory import IntArray
from megarl.rollout.protocol import Request

Listener: TypeAlias = Callable[[list[int]], None]
"""Is told of the tokens that were sampled, as soon as they are."""


class Answer(Future[list[Turn]]):
    """The samples of a request, when all have ended."""

    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        self.ends = [Future[None]() for _ in range(samples - 1)]
        """Done one after the other as samples end before the last, but where they are cut, which ends all of them."""


class RequestInFlight:
    """One request: its future is done when all its samples are."""

    def __init__(self, request: Request, listener: Listener | None = None) -> None:
        self.listener = listener
        self._request = request
        # One array, which all samples share.
        self._prompt_ids = np.array(request.prompt_token_ids, dtype=np.int32)
        self.future = Answer(len(request.samples))
        self._turns: dict[int, Turn] = {}

    @property
    def conversation(self) -> int | None:
        """The one that it is part of."""
        return self._request.conversation

    @property
    def cache_salt(self) -> str:
        """It shares keys and values with requests that have the same one."""
        return self._request.cache_salt

    @property
    def prompt_tokens(self) -> int:
        """How many tokens all its samples begin with."""
        return len(self._prompt_ids)

    def begun_tokens(self, sample: int) -> int:
        """How many tokens a sample had before."""
        return len(self._request.begun_of(sample))

    def prompt_of(self, sample: int) -> IntArray:
        """The tokens before what is sampled."""
        begun = self._request.begun_of(sample)
        return np.concatenate([self._prompt_ids, np.array(begun, dtype=np.int32)]) if len(begun) else self._prompt_ids

    def finish(self, sample: int, turn: Turn) -> None:
        """Note one sample, and complete the future with the last one."""
        self._turns[sample] = turn
        samples = self._request.samples
        if len(self._turns) == len(samples):
            self.future.set_result([self._turns[each] for each in samples])
        elif turn.finish_reason != "abort":
            self.future.ends[len(self._turns) - 1].set_result(None)


@dataclass(eq=False)
class SampleInFlight:
    """One sample of a request, with its tokens so far."""

    request: RequestInFlight
    sample: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    told: int = 0
    """How many of its tokens were reported."""

    def take_untold(self) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
        """Tokens that were not reported yet, with log-probs and versions."""
        start, self.told = self.told, len(self.token_ids)
        return self.token_ids[start:], self.log_probs[start:], self.versions[start:]


def tokens_of(samples: Iterable[SampleInFlight]) -> int:
    """Tokens computed for samples that have begun; a prompt that samples share counts once."""
    begun = [each for each in samples if each.token_ids]
    prompts = {id(each.request): each.request.prompt_tokens for each in begun}
    return sum(prompts.values()) + sum(each.request.begun_tokens(each.sample) + len(each.token_ids) for each in begun)
