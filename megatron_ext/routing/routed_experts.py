"""The experts of each token as they travel from an engine to the ranks: one record of bytes per token."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from converters.errors import UserError

_NONE = 0xFF
"""Every byte of a record that says nothing: the token goes to the experts that the trainer chooses."""

RecordArrays: TypeAlias = Sequence[npt.NDArray[np.void]]
"""Records of tokens that lie end to end, one of them in each element of an array."""


class Records(NamedTuple):
    """The records of L tokens that a rank computes with: of all layers, and where the batch has them.

    A batch has hundreds of bytes for each token, and a pass needs a few of them: they stay in memory of the host, which
    processes may share, until `Routing.experts_of` takes out what the routers of one pass follow.
    """

    arrays: RecordArrays
    """Records of the tokens of a micro-batch."""
    tokens: Tensor
    """long[L]: which of them each token has; there is none for a number behind the last."""


class Routing(NamedTuple):
    """Sizes of a model's routing: in each of `layers` layers a token goes to `topk` of `experts` experts.

    Layers without experts do not count.

    Example: Routing(layers=58, topk=8, experts=256), whose records have 464 bytes
    """

    layers: int
    topk: int
    experts: int

    @classmethod
    def of(cls, transformer_config: Mapping[str, Any], num_layers: int) -> "Routing":
        """The sizes of a model with these fields of TransformerConfig. Raises UserError where there are no experts."""
        experts = transformer_config.get("num_moe_experts")
        if not experts:
            raise UserError("a model without experts has no routing to replay: set algorithm.router_replay=none")
        layers = layers_with_experts(transformer_config, num_layers)
        return cls(len(layers), transformer_config["moe_router_topk"], experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an expert's number in a record."""
        # Expert 255 alone, over and over, is no record of a token with several experts.
        fit_a_byte = 256 if self.topk > 1 else 255
        return np.dtype(np.uint8 if self.experts <= fit_a_byte else np.int16)

    @property
    def record_bytes(self) -> int:
        """The bytes of a token's record."""
        return self.layers * self.topk * self.dtype.itemsize

    def records(self, experts: npt.NDArray[Any], tokens: int) -> npt.NDArray[np.void]:
        """Records [tokens] of the `experts` [N, layers, topk] of the first N tokens; those of the others say nothing.

        Raises ValueError for `experts` of other sizes.
        """
        if experts.shape[1:] != (self.layers, self.topk) or len(experts) > tokens:
            raise ValueError(f"experts of shape {experts.shape} for {tokens} tokens do not fit {self}")
        content = np.full((tokens, self.record_bytes), _NONE, dtype=np.uint8)
        content.view(self.dtype)[: len(experts)] = experts.reshape(len(experts), self.layers * self.topk)
        return content.view(np.dtype((np.void, self.record_bytes)))[:, 0]

    def experts_of(self, records: Records, layers: Sequence[int]) -> Tensor:
        """int16[L, len(layers), topk]: the experts of L tokens in some layers by `records`, -1 for none.

        Raises RuntimeError where these are not of this model.
        """
        content = self._bytes(records)
        says_nothing = content.min(1) == _NONE
        numbers = content.view(self.dtype).reshape(len(content), self.layers, self.topk)
        experts = numbers[:, list(layers)].astype(np.int16)
        self._check(experts[~says_nothing])
        experts[says_nothing] = -1
        return torch.from_numpy(experts)

    def _bytes(self, records: Records) -> npt.NDArray[np.uint8]:
        """uint8[L, record_bytes]: the record of each of L tokens."""
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
        """Raise RuntimeError for `experts` [tokens, layers, topk] that no router of this model could choose."""
        if not experts.size:
            return
        if int(experts.max()) >= self.experts or int(experts.min()) < 0:
            raise RuntimeError(f"the engine routed a token to an expert that is none of {self.experts}")
        # To sort them would take ten times as long, and each pass waits for this.
        choices = [np.ascontiguousarray(experts[..., choice]) for choice in range(self.topk)]
        if any(bool((one == other).any()) for one, other in combinations(choices, 2)):
            raise RuntimeError(f"the engine routed a token to less than {self.topk} different experts of a layer")


def layers_with_experts(transformer_config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers with experts, of all, by fields of TransformerConfig."""
    pattern = transformer_config.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        return [layer for layer in range(num_layers) if layer % pattern == 0]
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]
