"""Discounted sums along every response, all responses at once.

y_t = x_t + decay * y_(t-1), or from the end y_t = x_t + decay * y_(t+1), within each response. Blocks of tokens are
multiplied with a triangular matrix of powers, whatever response they belong to; what passes from block to block is a
recurrence of the same form over one value per block. Only the few blocks in which a response begins or ends are taken
token by token, all of them side by side. So no value is ever divided by a power of the decay, and nothing is as slow as
a step per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.memory import empty
from megarl.algorithms.ragged import Ragged

# Tokens of a block: larger ones multiply more, smaller ones pass on more.
_BLOCK = 32


def prefix_sums(values: Tensor, responses: Ragged, decay: float = 1.0) -> Tensor:
    """The sum over k <= t of decay^(t-k) x_k within the response of t: finite float[T] to [T]."""
    return _sums(values, _cuts(responses), decay, _FORWARD)


def suffix_sums(values: Tensor, responses: Ragged, decay: float = 1.0) -> Tensor:
    """The sum over k >= t of decay^(k-t) x_k within the response of t: finite float[T] to [T]."""
    return _sums(values, _cuts(responses), decay, _BACKWARD)


@dataclass(frozen=True)
class _Direction:
    """Which of its neighbours a token hears from: the one before it, or the one after it."""

    backward: bool

    def powers(self, decay: float) -> Tensor:
        """float64[_BLOCK, _BLOCK + 1]: what a token hears of each of its block, and of the neighbouring block."""
        t = torch.arange(_BLOCK, dtype=torch.float64)
        distance = torch.cat([t[:, None] - t, t[:, None] + 1], dim=1)
        powers = torch.where(distance >= 0, torch.tensor(decay, dtype=torch.float64) ** distance.clamp(min=0), 0.0)
        return torch.cat([powers[:, :-1].flip(0, 1), powers[:, -1:].flip(0)], dim=1) if self.backward else powers

    def places(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks of the tokens that hear nothing from their neighbour, and their places in it as sums go."""
        if not self.backward:
            return cuts // _BLOCK, cuts % _BLOCK
        block = (cuts - 1) // _BLOCK
        return block, (block + 1) * _BLOCK - cuts

    def as_sums_go(self, rows: Tensor) -> Tensor:
        """Rows of blocks in the order of the sums; the other way round by itself."""
        return rows.flip(1) if self.backward else rows

    def last(self, rows: Tensor) -> Tensor:
        """What each block passes on: [B]."""
        return (rows[:, 0] if self.backward else rows[:, -1]).contiguous()

    def heard(self, passed_on: Tensor) -> Tensor:
        """What each block hears, from what each passes on: [B]."""
        nothing = passed_on.new_zeros(1)
        return torch.cat([passed_on[1:], nothing] if self.backward else [nothing, passed_on[:-1]])


_FORWARD, _BACKWARD = _Direction(backward=False), _Direction(backward=True)


def _cuts(responses: Ragged) -> Tensor:
    """long[K]: the tokens that begin a response, except the first token of all."""
    ends = responses.ends.unique_consecutive()
    return ends[(ends > 0) & (ends < responses.tokens)]


def _sums(values: Tensor, cuts: Tensor, decay: float, direction: _Direction) -> Tensor:
    """Along `values` [T], which do not hear from each other across `cuts`."""
    powers = direction.powers(decay).to(values)
    rows = _multiplied(values, powers[:, :-1].T)
    blocks, offsets = direction.places(cuts)
    cut, row = blocks.unique_consecutive(return_inverse=True)
    hears = values.new_full((len(cut), _BLOCK), decay).index_put_((row, offsets), values.new_zeros(()))
    rows[cut] = direction.as_sums_go(_token_by_token(direction.as_sums_go(_rows(values, cut)), hears))
    if len(rows) > 1:
        # Between a block and its neighbour there is a cut if there is one anywhere on the way through the block.
        between = cut + 1 if direction.backward else cut
        between = between[(between > 0) & (between < len(rows))]
        heard = direction.heard(_sums(direction.last(rows), between, decay**_BLOCK, direction))
        in_part = direction.as_sums_go(hears.cumprod(1)) * heard[cut, None]
        heard[cut] = 0
        rows.addr_(heard, powers[:, -1])
        rows.index_add_(0, cut, in_part)
    return rows.view(-1)[: len(values)]


def _multiplied(values: Tensor, matrix: Tensor) -> Tensor:
    """Blocks of `values` times `matrix`, the last one filled with zeros: [T] to [B, _BLOCK]."""
    whole = len(values) // _BLOCK
    rows = empty(-(-len(values) // _BLOCK) * _BLOCK, values).view(-1, _BLOCK)
    torch.mm(values[: whole * _BLOCK].view(-1, _BLOCK), matrix, out=rows[:whole])
    if whole < len(rows):
        rest = values[whole * _BLOCK :]
        rows[whole] = rest @ matrix[: len(rest)]
    return rows


def _rows(values: Tensor, blocks: Tensor) -> Tensor:
    """A copy of some blocks, the last one filled with zeros: [T] to [len(blocks), _BLOCK]."""
    places = blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device=blocks.device)
    return values[places.clamp(max=len(values) - 1)].masked_fill_(places >= len(values), 0.0)


def _token_by_token(rows: Tensor, hears: Tensor) -> Tensor:
    for t in range(1, rows.shape[1]):
        rows[:, t].addcmul_(hears[:, t], rows[:, t - 1])
    return rows
