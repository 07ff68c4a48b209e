"""Texts of answers, made where they are sampled: the controller has no time for thousands of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.data import Turn
from megarl.data.stretches import here

_MANY = 64
"""Tokens; text of fewer is made by whoever reads it, without a tokenizer here."""


class Texts:
    """Reads tokens by the tokenizer of a HuggingFace folder, which it opens when it first needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def added(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns, with their text but for short ones."""
        return [replace(turn, text=self._text(turn)) if len(turn.token_ids) >= _MANY else turn for turn in turns]

    def _text(self, turn: Turn) -> str:
        # An array: transformers (5.19) looks at each number of a list by itself, which takes longer than all else.
        return self._tokenizer.decode(here(turn.token_ids), skip_special_tokens=True)

    @cached_property
    def _tokenizer(self) -> Any:
        # Not the engine's own, which might be another than the run's.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
