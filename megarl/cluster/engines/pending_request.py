"""A request in flight, and what has been sampled of its answer."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.progress_log import NOTHING, PartialSample
from megarl.cluster.workers.worker import Worker
from megarl.data import Turn
from megarl.rollout.protocol import Request

PartialTurns: TypeAlias = Mapping[int, Turn]
"""Turns of a request's samples: finished ones, and unfinished ones, with reason "abort" and without a prompt."""


@dataclass(eq=False)
class PendingRequest:
    """A request in flight; `answer` gets its samples, all from one engine."""

    number: int
    request: Request
    among: Sequence[EngineHandle]
    """The engines that it may go to."""
    answer: Future[list[Turn]] = field(default_factory=Future)
    handle: EngineHandle | None = None
    """The engine that the request was sent to; None while it is queued."""
    worker: Worker | None = None
    """The process that the request was sent to; a restarted engine has another one."""
    load: int = 0
    """The number of its unfinished samples on that engine."""
    begun: dict[int, PartialSample] = field(default_factory=dict)
    """Unfinished samples with their tokens from engines that died or aborted them."""
    ended: dict[int, Turn] = field(default_factory=dict)
    """Samples that have ended."""

    @property
    def samples(self) -> int:
        """The number of samples that it asks for."""
        return self.request.sampling.samples - len(self.ended)

    @property
    def tokens(self) -> int:
        """The number of tokens that an engine computes before it samples; the prompt counts once."""
        begun = sum(len(self._begun(sample).token_ids) for sample in self.left)
        return len(self.request.prompt_token_ids) + begun

    @property
    def left(self) -> list[int]:
        """The unfinished samples."""
        return [sample for sample in range(self.request.sampling.samples) if sample not in self.ended]

    def rest(self) -> Request:
        """The remaining request: only unfinished samples, each with its tokens so far."""
        if not self.begun and not self.ended:
            return self.request
        return replace(self.request, begun={sample: self._begun(sample).token_ids for sample in self.left})

    def keep(self, begun: Mapping[int, PartialSample]) -> int:
        """Keep the tokens that an engine reported before it died. Returns their number."""
        for sample, new in begun.items():
            self.begun[sample] = self.begun[sample] + new if sample in self.begun else new
        return sum(len(new.token_ids) for new in begun.values())

    def keep_answer(self, turns: Sequence[Turn]) -> None:
        """Keep an answer: the turns of the remaining samples, some of which may have been aborted again."""
        self.keep_turns(dict(zip(self.left, turns, strict=True)))

    def keep_turns(self, turns: PartialTurns) -> None:
        """Append a turn to each of some samples."""
        for sample, turn in turns.items():
            if turn.finish_reason == "abort":
                self.keep({sample: PartialSample.of(turn)})
            else:
                self.ended[sample] = self._begun(sample).ended_by(turn)

    def partial_turns(self) -> PartialTurns:
        """Everything sampled so far."""
        begun = {sample: self.begun[sample].cut() for sample in self.left if sample in self.begun}
        return {**begun, **self.ended}

    def copy(self) -> "PendingRequest":
        """A copy that does not see later progress."""
        return replace(self, begun=self.begun.copy(), ended=self.ended.copy())

    def whole(self) -> list[Turn]:
        """The turns of all samples, all of which must have ended."""
        return [self.ended[sample] for sample in range(self.request.sampling.samples)]

    def _begun(self, sample: int) -> PartialSample:
        return self.begun.get(sample, NOTHING)
