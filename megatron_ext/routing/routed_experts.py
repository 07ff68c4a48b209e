"""The experts of each token as they travel from an engine to the ranks: one record of bytes per token."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from converters.errors import UserError

_NONE = 0xFF
"""Every byte of a record that says nothing: the token goes to the experts that the trainer chooses."""


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

    def experts_of(self, records: Tensor, layers: Sequence[int]) -> Tensor:
        """long[T, len(layers), topk]: the experts in some layers by `records` uint8[T, record_bytes], -1 for none."""
        chosen = self._numbers(records)[:, list(layers)].long()
        return chosen.masked_fill_(self._say_nothing(records)[:, None, None], -1)

    def check(self, records: Tensor) -> None:
        """Raise RuntimeError for `records` uint8[T, bytes] that are not of this model."""
        if records.shape[1] != self.record_bytes:
            raise RuntimeError(
                f"the engine's records of routed experts have {records.shape[1]} bytes, and {self} needs"
                f" {self.record_bytes}: engine and trainer have different models"
            )
        ascending = self._numbers(records)[~self._say_nothing(records)].sort(-1).values
        if not ascending.numel():
            return
        if int(ascending[..., -1].max()) >= self.experts or int(ascending[..., 0].min()) < 0:
            raise RuntimeError(f"the engine routed a token to an expert that is none of {self.experts}")
        if bool((ascending[..., 1:] == ascending[..., :-1]).any()):
            raise RuntimeError(f"the engine routed a token to less than {self.topk} different experts of a layer")

    def _numbers(self, records: Tensor) -> Tensor:
        return (records if self.dtype.itemsize == 1 else records.view(torch.int16)).unflatten(
            1, (self.layers, self.topk)
        )

    @staticmethod
    def _say_nothing(records: Tensor) -> Tensor:
        return (records == _NONE).all(1)


def layers_with_experts(transformer_config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers with experts, of all, by fields of TransformerConfig."""
    pattern = transformer_config.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        return [layer for layer in range(num_layers) if layer % pattern == 0]
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]


def padded(records: Tensor, padding: int) -> Tensor:
    """Records uint8[T, bytes] of T tokens and, behind them, of `padding` ones that say nothing."""
    return torch.cat([records, records.new_full((padding, records.shape[1]), _NONE)])
