"""Decodes answers on the engine's side: the controller has no time to decode thousands of them."""

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
"""Answers with fewer tokens are left for the reader to decode, so that short ones need no tokenizer here."""


class Texts:
    """Decodes tokens with the tokenizer of a HuggingFace folder, loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def added(self, turns: Sequence[Turn], request: Request) -> list[Turn]:
        """The turns that answer a request, with the text of all but short ones."""
        return [
            self._with_text(turn, request.begun_of(sample)) for sample, turn in zip(request.samples, turns, strict=True)
        ]

    def _with_text(self, turn: Turn, begun: TokenIds) -> Turn:
        if turn.finish_reason == "abort" or len(begun) + len(turn.token_ids) < _TEXT_FROM_TOKENS:
            return turn
        # An array, because transformers (5.19) inspects each element of a list, which would dominate the time.
        tokens = np.concatenate([np.asarray(begun, np.int32), fetch(turn.token_ids)])
        return replace(turn, text=self._tokenizer.decode(tokens, skip_special_tokens=True))

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        # Not the engine's own tokenizer, which may differ from the run's.
        return read_tokenizer(self._folder)
