"""Incremental detokenization."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes a stream of tokens to pieces of text, which concatenate to what `decode` returns for all tokens.

    Special tokens are left out. A character that spans several tokens is returned with its last one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # The text of a token depends on the tokens before it, so the last piece is decoded again with the next one.
        self._context, self._done = 0, 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete."""
        self._token_ids += token_ids
        piece = self._new()
        if piece.endswith(_UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._token_ids)
        return piece

    def end(self) -> str:
        """Return the remaining text if the tokens end within a character."""
        return self._new()

    def _new(self) -> str:
        before = self._decode(self._token_ids[self._context : self._done])
        return self._decode(self._token_ids[self._context :])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
