"""The order in which prompts are drawn."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from converters.errors import UserError


class SamplerState(TypedDict):
    """State of a `PromptSampler` in a checkpoint."""

    size: int
    shuffle: bool
    seed: int
    epoch: int
    position: int
    digest: str
    """Digest of the prompts (`digest_of`); "" if none was given."""


def digest_of(prompts: Iterable[Sequence[int]]) -> str:
    """Digest of the tokens of prompts; it changes with any prompt and with their order."""
    digest = hashlib.sha256()
    for token_ids in prompts:
        digest.update(len(token_ids).to_bytes(8))
        digest.update(np.asarray(token_ids, np.int64).tobytes())
    return digest.hexdigest()


class PromptSampler:
    """Draws each of `size` indices once per epoch, endlessly.

    The order of an epoch is a function of (seed, epoch), so the position is the whole state, and a resumed sampler
    continues exactly where the saved one stopped. A draw that reaches the end of an epoch continues in the next.
    """

    def __init__(self, size: int, shuffle: bool, seed: int, digest: str = "") -> None:
        if size < 1:
            raise ValueError(f"a sampler needs at least one prompt, got size={size}")
        self._size, self._shuffle, self._seed, self._digest = size, shuffle, seed, digest
        self._other: tuple[int, npt.NDArray[np.int64]] | None = None
        """Cache: number and order of the last epoch other than the current one that was asked for."""
        self._start_epoch(0, position=0)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next index is drawn from."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """How many indices have been drawn, over all epochs: the ordinal of the next draw."""
        return self._epoch * self._size + self._position

    def draw(self, count: int) -> list[tuple[int, int]]:
        """Return (ordinal, index) of the next `count` draws."""
        first = self.drawn
        return list(enumerate(self.next(count), start=first))

    def index_of(self, ordinal: int) -> int:
        """The index of the draw with this ordinal, past or future."""
        epoch, position = divmod(ordinal, self._size)
        return int(self._known_order_of(epoch)[position])

    def next(self, count: int) -> list[int]:
        """Return the next `count` indices."""
        drawn: list[int] = []
        while len(drawn) < count:
            piece = self._order[self._position : self._position + count - len(drawn)]
            drawn += piece.tolist()
            self._position += len(piece)
            if self._position == self._size:
                self._start_epoch(self._epoch + 1, position=0)
        return drawn

    def state_dict(self) -> SamplerState:
        """Return the position and what the order depends on."""
        return SamplerState(
            size=self._size,
            shuffle=self._shuffle,
            seed=self._seed,
            epoch=self._epoch,
            position=self._position,
            digest=self._digest,
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue from `state`. Raises `UserError` if it was saved with other prompts, seed or shuffling."""
        own = self.state_dict()
        for key in ("size", "shuffle", "seed"):
            if state[key] != own[key]:
                raise UserError(
                    f"the checkpoint's prompt sampler has {key}={state[key]} and this run {key}={own[key]}, so the "
                    f"order of prompts cannot be continued; resume with the same data, data.shuffle and loop.seed"
                )
        if state["digest"] != self._digest:
            raise UserError(
                "the checkpoint's examples are not those of this run, although there are as many, so that their order "
                "cannot be continued; resume with the same data files, chat template and, of prompts, "
                "data.max_prompt_tokens"
            )
        self._start_epoch(state["epoch"], state["position"])

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._order, self._epoch, self._position = self._order_of(epoch), epoch, position

    def _known_order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch, cached for the current epoch and for the last other one."""
        if epoch == self._epoch:
            return self._order
        # A resumed run asks for its carried-over draws one by one, and they reach back into at most one other epoch.
        if self._other is None or self._other[0] != epoch:
            self._other = epoch, self._order_of(epoch)
        return self._other[1]

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        order = np.arange(self._size)
        return np.random.default_rng((self._seed, epoch)).permutation(order) if self._shuffle else order
