"""Rotary frequencies of packed sequences: tables of few lengths, and rows where a shared prefix is before a node."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """The bounds of the sequences of a micro-batch, and how long the tables are that their positions are looked up in.

    Example: PackedSequences(**bounds, rotary_rows=table_rows(longest=700, tokens=3000)) has tables of 1024 positions.
    """

    rotary_rows: int | None = None
    """None is as many as the longest sequence has tokens."""


def table_rows(longest: int, tokens: int) -> int:
    """Rows of the table for sequences of at most `longest` of all `tokens`: round numbers, of which there are few.

    Where a sequence is not all, they are fewer than `tokens`: latent attention cuts more off, and megatron-core takes a
    table of as many rows as tokens for one of a row for each.
    """
    step = 1 << (longest - 1).bit_length()
    if longest >= tokens:
        return step
    while (rows := -(-longest // step) * step) >= tokens:
        step //= 2
    return rows


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
