"""Arithmetic on responses of different lengths, stored end to end without padding."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Tokens: 2 MiB of float32, which stay in the cache until they are read.
_PART = 2**19
_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Ragged:
    """N responses end to end, T = sum(lengths) tokens.

    Contains only tokens that the policy sampled and is trained on. All others (output of a tool, masked tokens) are
    removed before, so there are no masks here. A response whose tokens are all masked has length 0.
    """

    lengths: Tensor
    """long[N]"""

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """T."""
        return int(self.lengths.sum())

    @cached_property
    def ends(self) -> Tensor:
        """long[N]: end of each response, exclusive."""
        return self.lengths.cumsum(0)

    @property
    def starts(self) -> Tensor:
        """long[N]: index of each response's first token."""
        return self.ends - self.lengths

    @cached_property
    def last_tokens(self) -> Tensor:
        """long[M]: index of the last token of each of the M responses with tokens."""
        return self.ends[self._with_tokens] - 1

    @cached_property
    def _with_tokens(self) -> Tensor:
        """long[M]: indices of the responses with tokens."""
        return self.lengths.nonzero().squeeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat one value per response [N] for each of its tokens [T]; differentiable."""
        if _is_plain(values):
            # numpy takes a tenth of torch's time, and does not build torch's index of 8 bytes a token.
            return torch.from_numpy(np.repeat(values.numpy(), self.lengths.numpy()))
        return values.repeat_interleave(self.lengths, output_size=self.tokens)

    def spread_part(self, values: Tensor, tokens: slice) -> Tensor:
        """The slice `tokens` of `spread`, without computing the rest."""
        first = int(torch.searchsorted(self.ends, tokens.start))
        end = int(torch.searchsorted(self.starts, tokens.stop))
        ends, starts = self.ends[first:end].clamp(max=tokens.stop), self.starts[first:end].clamp(min=tokens.start)
        return Ragged(ends - starts).spread(values[first:end])

    def add_(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Add values per response [N] to `tokens` [T] in place, in parts that stay in the cache. Returns `tokens`."""
        for start in range(0, len(tokens), _PART):
            part = slice(start, min(start + _PART, len(tokens)))
            tokens[part] += self.spread_part(values, part)
        return tokens

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each response: [T] to [N], 0 for a response without tokens; differentiable."""
        if _is_plain(values) and self.tokens:
            # numpy sums pairwise, torch does not: that keeps the precision over thousands of tokens.
            present = self.lengths > 0
            sums = np.add.reduceat(values.numpy(), self.starts[present].numpy())
            return values.new_zeros(len(self)).masked_scatter_(present, torch.from_numpy(sums))
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each response: [T] to [N], 0 for a response without tokens; differentiable."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def at_last_token(self, values: Tensor) -> Tensor:
        """Put values per response [N] at their last tokens, 0 at all others: [T]. Drops values of empty responses."""
        return self.add_at_last_token_(empty(self.tokens, values).zero_(), values)

    def add_at_last_token_(self, tokens: Tensor, values: Tensor, start: int = 0) -> Tensor:
        """Add values per response [N] to `tokens` at their last tokens, in place. Drops values of empty responses.

        `tokens` is float[T], or a part of it that begins at token `start`. Returns `tokens`.
        """
        first, end = torch.searchsorted(self.last_tokens, torch.tensor([start, start + len(tokens)]).to(values.device))
        tokens[self.last_tokens[first:end] - start] += values[self._with_tokens[first:end]]
        return tokens


def _is_plain(values: Tensor) -> bool:
    """Whether numpy can read these values without a copy, and no gradient is needed."""
    return values.device.type == "cpu" and not values.requires_grad and values.dtype in (torch.float32, torch.float64)


def empty(count: int, like: Tensor) -> Tensor:
    """Uninitialized [count] with the dtype and device of `like`.

    On a CPU numpy allocates it, which asks for huge pages: touching 100 MB of small pages for the first time takes
    several times as long as an addition over them.
    """
    if like.device.type == "cpu" and like.dtype in _NUMPY_TYPES:
        return torch.from_numpy(np.empty(count, _NUMPY_TYPES[like.dtype]))
    return like.new_empty(count)
