"""Requests in flight, until all their samples have ended."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from megarl.data import Turn
from megarl.data.trajectory import IntArray
from megarl.rollout.protocol import Request

Listener: TypeAlias = Callable[[list[int]], None]
"""Called with new tokens as soon as they are sampled."""


class Answer(Future[list[Turn]]):
    """A future for the samples of a request, done when all have ended."""

    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        self.ends = [Future[None]() for _ in range(samples - 1)]
        """Done one by one as samples end before the last one, unless an abort ends all of them together."""


class RequestInFlight:
    """One request; its future is done when all its samples have ended."""

    def __init__(self, request: Request, listener: Listener | None = None) -> None:
        self.listener = listener
        self._request = request
        # One array, shared by all samples.
        self._prompt_ids = np.array(request.prompt_token_ids, dtype=np.int32)
        self.future = Answer(len(request.samples))
        self._turns: dict[int, Turn] = {}

    @property
    def conversation(self) -> int | None:
        """The request's conversation, if it has one."""
        return self._request.conversation

    @property
    def cache_salt(self) -> str:
        """The request's cache salt, see `Request.cache_salt`."""
        return self._request.cache_salt

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, which all samples share."""
        return len(self._prompt_ids)

    def begun_tokens(self, sample: int) -> int:
        """The number of tokens that a sample had when the request came."""
        return len(self._request.begun_of(sample))

    def prompt_of(self, sample: int) -> IntArray:
        """The tokens before the first one to sample."""
        begun = self._request.begun_of(sample)
        return np.concatenate([self._prompt_ids, np.array(begun, dtype=np.int32)]) if len(begun) else self._prompt_ids

    def finish(self, sample: int, turn: Turn) -> None:
        """Note the end of a sample; the last one completes the future."""
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
    """The number of its tokens that were reported."""

    def take_untold(self) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
        """Return the tokens not yet reported, with log-probs and versions, and count them as reported."""
        start, self.told = self.told, len(self.token_ids)
        return self.token_ids[start:], self.log_probs[start:], self.versions[start:]


def tokens_of(samples: Iterable[SampleInFlight]) -> int:
    """The number of tokens computed for samples that have begun, counting a shared prompt once."""
    begun = [each for each in samples if each.token_ids]
    prompts = {id(each.request): each.request.prompt_tokens for each in begun}
    return sum(prompts.values()) + sum(each.request.begun_tokens(each.sample) + len(each.token_ids) for each in begun)
