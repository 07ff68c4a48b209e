"""Rotary positions of tokens whose stretch does not begin at position 0, since a shared prefix is before it."""

from typing import Any

import torch
from torch import Tensor


def rotate_by_position(chunk: torch.nn.Module) -> None:
    """Have every rotary embedding of `chunk` follow the positions of `SharedSequences`, where it is given these.

    megatron-core 0.16.1 counts the positions of packed sequences from each bound. Frequencies for as many rows as there
    are tokens it takes row by row instead (`rope_utils._apply_rotary_pos_emb_thd`), so each token is given its own.
    """
    for module in chunk.modules():
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, torch.nn.Module):
            following = _Following()
            # The model asks its embedding once for all layers, and each latent attention asks its own, also where a
            # layer is computed again: both are told the sequences of the micro-batch just before.
            module.register_forward_pre_hook(following.hear, with_kwargs=True)
            rotary.register_forward_hook(following.pick)


class _Following:
    def __init__(self) -> None:
        self._positions: Tensor | None = None

    def hear(self, _module: torch.nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        self._positions = getattr(options.get("packed_seq_params"), "positions", None)

    def pick(self, _rotary: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if self._positions is None:
            return output
        # YaRN gives a factor beside the frequencies.
        if isinstance(output, tuple):
            return output[0][self._positions], *output[1:]
        return output[self._positions]
