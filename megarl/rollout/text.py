"""Texts of answers, made where they are sampled: the controller has no time for thousands of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.data import Turn
from megarl.data.stretches import fetch
from megarl.data.tokenizer import read_tokenizer
from megarl.rollout.protocol import Request, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT_FROM_TOKENS = 64
"""Tokens; text of fewer is made by whoever reads it, without a tokenizer here."""


class Texts:
    """Turns tokens into text with the tokenizer of a HuggingFace folder, opened on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def added(self, turns: Sequence[Turn], request: Request) -> list[Turn]:
        """The answer to a request, with texts but for short ones."""
        return [
            self._with_text(turn, request.begun_of(sample)) for sample, turn in zip(request.samples, turns, strict=True)
        ]

    def _with_text(self, turn: Turn, begun: TokenIds) -> Turn:
        if turn.finish_reason == "abort" or len(begun) + len(turn.token_ids) < _TEXT_FROM_TOKENS:
            return turn
        # An array: transformers (5.19) looks at each number of a list by itself, which takes longer than all else.
        tokens = np.concatenate([np.asarray(begun, np.int32), fetch(turn.token_ids)])
        return replace(turn, text=self._tokenizer.decode(tokens, skip_special_tokens=True))

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        # Not the engine's own, which might be another than the run's.
        return read_tokenizer(self._folder)
