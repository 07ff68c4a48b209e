"""Arithmetic on responses of different lengths that lie end to end, without padding."""

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

    Only tokens that the policy generated and is trained on are among them: what else stands in a response (the output
    of a tool, a masked token) is taken out before, so nothing here knows of masks. A response whose tokens are all
    masked has length 0.
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
        """long[N]: where each response ends, exclusive."""
        return self.lengths.cumsum(0)

    @property
    def starts(self) -> Tensor:
        """long[N]: where each response begins."""
        return self.ends - self.lengths

    @cached_property
    def last_tokens(self) -> Tensor:
        """long[M]: the last token of each response that has one."""
        return self.ends[self._with_tokens] - 1

    @cached_property
    def _with_tokens(self) -> Tensor:
        """long[M]: the responses that have a token."""
        return self.lengths.nonzero().squeeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """One value per response [N] to every one of its tokens [T]; differentiable."""
        if _is_plain(values):
            # Without the index of 8 bytes a token that torch builds, and in a tenth of its time.
            return torch.from_numpy(np.repeat(values.numpy(), self.lengths.numpy()))
        return values.repeat_interleave(self.lengths, output_size=self.tokens)

    def spread_part(self, values: Tensor, tokens: slice) -> Tensor:
        """`spread`, but only for the tokens of a slice; the others are not computed."""
        first = int(torch.searchsorted(self.ends, tokens.start))
        end = int(torch.searchsorted(self.starts, tokens.stop))
        ends, starts = self.ends[first:end].clamp(max=tokens.stop), self.starts[first:end].clamp(min=tokens.start)
        return Ragged(ends - starts).spread(values[first:end])

    def add_(self, tokens: Tensor, values: Tensor) -> Tensor:
        """Adds values per response [N] to all their `tokens` [T], in parts that stay in the cache. Returns `tokens`."""
        for start in range(0, len(tokens), _PART):
            part = slice(start, min(start + _PART, len(tokens)))
            tokens[part] += self.spread_part(values, part)
        return tokens

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each response: [T] to [N], 0 for a response without tokens; differentiable."""
        if _is_plain(values) and self.tokens:
            # Pairwise, as torch's own is not: the digits of thousands of tokens stay.
            present = self.lengths > 0
            sums = np.add.reduceat(values.numpy(), self.starts[present].numpy())
            return values.new_zeros(len(self)).masked_scatter_(present, torch.from_numpy(sums))
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each response: [T] to [N], 0 for a response without tokens; differentiable."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def at_last_token(self, values: Tensor) -> Tensor:
        """Values per response [N] at their last tokens, 0 at all others: [T]. An empty response loses its value."""
        return self.add_at_last_token_(empty(self.tokens, values).zero_(), values)

    def add_at_last_token_(self, tokens: Tensor, values: Tensor, start: int = 0) -> Tensor:
        """Adds values per response [N] to `tokens` where their last ones are; that of an empty response is lost.

        `tokens` is float[T], or of a part that begins with the token `start`. Returns it.
        """
        first, end = torch.searchsorted(self.last_tokens, torch.tensor([start, start + len(tokens)]).to(values.device))
        tokens[self.last_tokens[first:end] - start] += values[self._with_tokens[first:end]]
        return tokens


def _is_plain(values: Tensor) -> bool:
    """Whether numpy can read these values where they are."""
    return values.device.type == "cpu" and not values.requires_grad and values.dtype in (torch.float32, torch.float64)


def empty(count: int, like: Tensor) -> Tensor:
    """Uninitialised [count], of the type and device of `like`.

    On a CPU it comes from numpy, which asks for huge pages: touching 100 MB in small ones for the first time takes
    longer than an addition in them, several times over.
    """
    if like.device.type == "cpu" and like.dtype in _NUMPY_TYPES:
        return torch.from_numpy(np.empty(count, _NUMPY_TYPES[like.dtype]))
    return like.new_empty(count)
