"""The format in which each token's experts are sent from an engine to the ranks: one record of bytes per token."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from converters.errors import UserError

_NONE = 0xFF
"""Every byte of an empty record: the trainer chooses the token's experts itself."""

RecordArrays: TypeAlias = Sequence[npt.NDArray[np.void]]
"""Records of consecutive tokens, in one or more arrays; each element is one record."""


class Records(NamedTuple):
    """The records of the L tokens that a rank computes with, for all layers, without copying them from the batch.

    A batch has hundreds of bytes per token, and a pass only needs a few of them. So they stay in host memory, which
    processes may share, until `Routing.experts_of` extracts what the routers of one pass need.
    """

    arrays: RecordArrays
    """The records of a micro-batch's tokens."""
    tokens: Tensor
    """long[L]: the index of each token's record; an index beyond the last record means an empty record."""


class Routing(NamedTuple):
    """Sizes of a model's routing: in each of `layers` layers with experts, a token goes to `topk` of `experts` experts.

    Example: Routing(layers=58, topk=8, experts=256), whose records have 464 bytes
    """

    layers: int
    topk: int
    experts: int

    @classmethod
    def of(cls, transformer_config: Mapping[str, Any], num_layers: int) -> "Routing":
        """The sizes of a model with these fields of TransformerConfig. Raises UserError if it has no experts."""
        experts = transformer_config.get("num_moe_experts")
        if not experts:
            raise UserError("a model without experts has no routing to replay: set algorithm.router_replay=none")
        layers = layers_with_experts(transformer_config, num_layers)
        return cls(len(layers), transformer_config["moe_router_topk"], experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an expert's index in a record."""
        # With several different experts per token, a record cannot consist of expert 255 alone.
        fit_a_byte = 256 if self.topk > 1 else 255
        return np.dtype(np.uint8 if self.experts <= fit_a_byte else np.int16)

    @property
    def record_bytes(self) -> int:
        """Size of a token's record in bytes."""
        return self.layers * self.topk * self.dtype.itemsize

    def records(self, experts: npt.NDArray[Any], tokens: int) -> npt.NDArray[np.void]:
        """Make records [tokens] from the `experts` [N, layers, topk] of the first N tokens; the others are empty.

        Raises ValueError for `experts` of other sizes.
        """
        if experts.shape[1:] != (self.layers, self.topk) or len(experts) > tokens:
            raise ValueError(f"experts of shape {experts.shape} for {tokens} tokens do not fit {self}")
        content = np.full((tokens, self.record_bytes), _NONE, dtype=np.uint8)
        content.view(self.dtype)[: len(experts)] = experts.reshape(len(experts), self.layers * self.topk)
        return content.view(np.dtype((np.void, self.record_bytes)))[:, 0]

    def experts_of(self, records: Records, layers: Sequence[int]) -> Tensor:
        """int16[L, len(layers), topk]: the experts of L tokens in some layers; -1 for tokens with an empty record.

        Raises RuntimeError if the records are not of this model.
        """
        content = self._bytes(records)
        says_nothing = content.min(1) == _NONE
        numbers = content.view(self.dtype).reshape(len(content), self.layers, self.topk)
        experts = numbers[:, list(layers)].astype(np.int16)
        self._check(experts[~says_nothing])
        experts[says_nothing] = -1
        return torch.from_numpy(experts)

    def _bytes(self, records: Records) -> npt.NDArray[np.uint8]:
        """uint8[L, record_bytes]: the record of each token."""
        for each in records.arrays:
            if each.itemsize != self.record_bytes:
                raise RuntimeError(
                    f"the engine's records of routed experts have {each.itemsize} bytes, and {self} needs"
                    f" {self.record_bytes}: engine and trainer have different models"
                )
        nothing = self.records(np.empty((0, self.layers, self.topk)), 1)
        content = np.concatenate([*records.arrays, nothing])
        of_tokens = content[records.tokens.clamp(max=len(content) - 1).numpy()]
        return of_tokens.view(np.uint8).reshape(len(of_tokens), self.record_bytes)

    def _check(self, experts: npt.NDArray[np.int16]) -> None:
        """Raise RuntimeError for `experts` [tokens, layers, topk] that no router of this model can choose."""
        if not experts.size:
            return
        if int(experts.max()) >= self.experts or int(experts.min()) < 0:
            raise RuntimeError(f"the engine routed a token to an expert that is none of {self.experts}")
        # Sorting would take ten times as long, and each pass waits for this.
        choices = [np.ascontiguousarray(experts[..., choice]) for choice in range(self.topk)]
        if any(bool((one == other).any()) for one, other in combinations(choices, 2)):
            raise RuntimeError(f"the engine routed a token to less than {self.topk} different experts of a layer")


def layers_with_experts(transformer_config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Indices of the layers with experts, from fields of TransformerConfig."""
    pattern = transformer_config.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        return [layer for layer in range(num_layers) if layer % pattern == 0]
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]
