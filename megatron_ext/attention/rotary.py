"""Rotary frequencies of packed sequences: tables of few distinct lengths, and per-token rows for shared prefixes."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """The bounds of a micro-batch's sequences, and the length of the rotary tables for their positions.

    Example: PackedSequences(**bounds, rotary_rows=table_rows(longest=700, tokens=3000)) has tables of 1024 positions.
    """

    rotary_rows: int | None = None
    """Rows of the table; None means the length of the longest sequence."""


def table_rows(longest: int, tokens: int) -> int:
    """Rows of the table for sequences of at most `longest` of all `tokens`: one of few round numbers.

    Unless one sequence has all tokens, the result is below `tokens`: latent attention would cut off more rows, and
    megatron-core takes a table with as many rows as tokens for one with a row per token.
    """
    step = 1 << (longest - 1).bit_length()
    if longest >= tokens:
        return step
    while (rows := -(-longest // step) * step) >= tokens:
        step //= 2
    return rows


def rotate_by_position(chunk: torch.nn.Module) -> None:
    """Make every rotary embedding of `chunk` use the positions of `SharedSequences`, if it is given these.

    megatron-core 0.16.1 counts positions from each bound of packed sequences. But a table with as many rows as tokens
    is applied row by row (`rope_utils._apply_rotary_pos_emb_thd`), so each token is given its own frequencies.
    """
    for module in chunk.modules():
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, torch.nn.Module):
            following = _Following()
            # The model calls its embedding once for all layers; each latent attention calls its own, also on recompute.
            # Both receive the micro-batch's sequences just before that.
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
        # YaRN also returns a factor.
        if isinstance(output, tuple):
            return output[0][self._positions], *output[1:]
        return output[self._positions]
