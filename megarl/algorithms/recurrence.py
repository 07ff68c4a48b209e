"""Discounted sums along every response, all responses at once.

y_t = x_t + decay * y_(t-1), or backward y_t = x_t + decay * y_(t+1), within each response. All tokens are cut into
blocks, and each block is multiplied by a triangular matrix of powers of the decay, regardless of response boundaries.
The carry from block to block is a recurrence of the same form with one value per block. Only the few blocks in which a
response begins or ends are computed token by token, all such blocks in parallel. No value is ever divided by a power of
the decay, and there is no sequential loop over all tokens.

Values may be given as a function of a slice of the tokens. They are then computed a piece at a time and read while they
are in the cache: writing all of them first would take as long as summing them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms.ragged import Ragged, empty

# Tokens per block: larger blocks cost more multiplications, smaller ones more carries.
_BLOCK = 16
# Blocks per piece: 2 MiB of float32, which stay in the cache until they are read.
_PIECE = 2**15

Values = Tensor | Callable[[slice], Tensor]
"""Finite float[T], or a function from a slice of the T tokens to their values."""


def prefix_sums(values: Values, responses: Ragged, decay: float = 1.0) -> Tensor:
    """The sum over k <= t of decay^(t-k) x_k within the response of t: finite float[T] to [T]."""
    return _sums(_given(values), responses.tokens, _cuts(responses), decay, _FORWARD)


def suffix_sums(values: Values, responses: Ragged, decay: float = 1.0) -> Tensor:
    """The sum over k >= t of decay^(k-t) x_k within the response of t: finite float[T] to [T]."""
    return _sums(_given(values), responses.tokens, _cuts(responses), decay, _BACKWARD)


@dataclass(frozen=True)
class _Direction:
    """The direction of the recurrence: each token takes its carry from the token before it, or from the one after."""

    backward: bool

    def powers(self, decay: float) -> Tensor:
        """float64[_BLOCK, _BLOCK + 1]: weights of each token in the block, and of the carry, in a token's sum."""
        t = torch.arange(_BLOCK, dtype=torch.float64)
        distance = torch.cat([t[:, None] - t, t[:, None] + 1], dim=1)
        powers = torch.where(distance >= 0, torch.tensor(decay, dtype=torch.float64) ** distance.clamp(min=0), 0.0)
        return torch.cat([powers[:, :-1].flip(0, 1), powers[:, -1:].flip(0)], dim=1) if self.backward else powers

    def places(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """Block, and position within it in the order of summation, of each token that starts without a carry."""
        if not self.backward:
            return cuts // _BLOCK, cuts % _BLOCK
        block = (cuts - 1) // _BLOCK
        return block, (block + 1) * _BLOCK - cuts

    def as_sums_go(self, rows: Tensor) -> Tensor:
        """Reorder rows of blocks to the order of summation; its own inverse."""
        return rows.flip(1) if self.backward else rows

    def last(self, rows: Tensor) -> Tensor:
        """The carry out of each block: [B]."""
        return (rows[:, 0] if self.backward else rows[:, -1]).contiguous()

    def heard(self, passed_on: Tensor) -> Tensor:
        """The carry into each block, from the carries out of the blocks: [B]."""
        nothing = passed_on.new_zeros(1)
        return torch.cat([passed_on[1:], nothing] if self.backward else [nothing, passed_on[:-1]])


_FORWARD, _BACKWARD = _Direction(backward=False), _Direction(backward=True)


def _cuts(responses: Ragged) -> Tensor:
    """long[K]: the first token of each response, without token 0."""
    ends = responses.ends.unique_consecutive()
    return ends[(ends > 0) & (ends < responses.tokens)]


def _given(values: Values) -> Callable[[slice], Tensor]:
    return values.__getitem__ if isinstance(values, Tensor) else values


def _sums(given: Callable[[slice], Tensor], tokens: int, cuts: Tensor, decay: float, direction: _Direction) -> Tensor:
    """Compute the sums along all `tokens`, with no carry across `cuts`."""
    powers = direction.powers(decay)
    blocks, offsets = direction.places(cuts)
    cut, row = blocks.unique_consecutive(return_inverse=True)
    rows, at_cuts = _multiplied(given, tokens, powers[:, :-1].T, cut)
    hears = rows.new_full((len(cut), _BLOCK), decay).index_put_((row, offsets), rows.new_zeros(()))
    rows[cut] = direction.as_sums_go(_token_by_token(direction.as_sums_go(at_cuts), hears))
    if len(rows) > 1:
        # A block with a cut anywhere in it passes no carry through to the next block.
        between = cut + 1 if direction.backward else cut
        between = between[(between > 0) & (between < len(rows))]
        passed_on = direction.last(rows)
        passed_on = _sums(passed_on.__getitem__, len(rows), between, decay**_BLOCK, direction)
        heard = direction.heard(passed_on)
        in_part = direction.as_sums_go(hears.cumprod(1)) * heard[cut, None]
        heard[cut] = 0
        # The product of a column and a row is several times as fast as addr_.
        rows.addmm_(heard[:, None], powers[:, -1].to(rows)[None])
        rows.index_add_(0, cut, in_part)
    return rows.view(-1)[:tokens]


def _multiplied(given: Callable[[slice], Tensor], tokens: int, matrix: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of values, zero-padded, times `matrix`: [B, _BLOCK]; and the blocks `cut` as they were before."""
    blocks = -(-tokens // _BLOCK)
    pieces = range(0, max(blocks, 1), _PIECE)
    cut_of = cut.split((cut // _PIECE).bincount(minlength=len(pieces)).tolist())
    rows, at_cuts = None, []
    for start, here in zip(pieces, cut_of, strict=True):
        values = _filled(given(slice(start * _BLOCK, min((start + _PIECE) * _BLOCK, tokens))))
        if rows is None:
            rows, matrix = empty(blocks * _BLOCK, values).view(-1, _BLOCK), matrix.to(values)
        torch.mm(values, matrix, out=rows[start : start + _PIECE])
        at_cuts.append(values[here - start])
    assert rows is not None
    return rows, torch.cat(at_cuts)


def _filled(values: Tensor) -> Tensor:
    """Cut into blocks and pad the last one with zeros: [T] to [B, _BLOCK]."""
    return pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK) if len(values) % _BLOCK else values.view(-1, _BLOCK)


def _token_by_token(rows: Tensor, hears: Tensor) -> Tensor:
    for t in range(1, rows.shape[1]):
        rows[:, t].addcmul_(hears[:, t], rows[:, t - 1])
    return rows
