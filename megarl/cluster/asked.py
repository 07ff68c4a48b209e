"""A request on its way over engines, and what there is of its answer."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.partials import Begun
from megarl.cluster.worker_group import Worker
from megarl.data import Turn
from megarl.rollout.protocol import Request


@dataclass(eq=False)
class Asked:
    """A request on its way: `answer` gets its samples, all of one engine."""

    number: int
    request: Request
    among: Sequence[EngineHandle]
    """Who may be asked."""
    answer: Future[list[Turn]] = field(default_factory=Future)
    handle: EngineHandle | None = None
    """Who was asked; None while it waits for somebody who can be."""
    worker: Worker | None = None
    """The process that was asked: an engine that is started anew has another."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Samples of which engines that died have told some tokens."""
    ended: dict[int, Turn] = field(default_factory=dict)
    """Samples that have ended, where others were cut."""

    @property
    def samples(self) -> int:
        """How many it asks for."""
        return self.request.sampling.samples - len(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens that an engine computes before it samples, those of the prompt once."""
        left = (each for sample, each in self.begun.items() if sample not in self.ended)
        return len(self.request.prompt_token_ids) + sum(len(each.token_ids) for each in left)

    def rest(self) -> Request:
        """As much of the request as there is nothing of."""
        if not self.begun and not self.ended:
            return self.request
        left = [sample for sample in range(self.request.sampling.samples) if sample not in self.ended]
        return replace(self.request, begun={sample: self._begun(sample).token_ids.tolist() for sample in left})

    def keep(self, begun: Mapping[int, Begun]) -> int:
        """Keep what an engine that died has told of; how many tokens."""
        for sample, new in begun.items():
            self.begun[sample] = self._begun(sample) + new
        return sum(len(new.token_ids) for new in begun.values())

    def keep_cut(self, turns: Sequence[Turn]) -> None:
        """Keep an answer of which some turns were cut."""
        for sample, turn in zip(self.rest().samples, turns, strict=True):
            if turn.finish_reason == "abort":
                self.keep({sample: Begun.of(turn)})
            else:
                self.ended[sample] = self._begun(sample).ended_by(turn)

    def whole(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of all samples, each behind what there was of it; `turns` are those of the last answer."""
        if not self.begun and not self.ended:
            return list(turns)
        asked = dict(zip(self.rest().samples, turns, strict=True))
        ended = {sample: self._begun(sample).ended_by(turn) for sample, turn in asked.items()} | self.ended
        return [ended[sample] for sample in range(self.request.sampling.samples)]

    def _begun(self, sample: int) -> Begun:
        return self.begun.get(sample, Begun.nothing())
