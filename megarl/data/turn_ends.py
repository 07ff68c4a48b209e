"""Ends of turns: the tokens from which a model learns to stop."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.data.chat import Message, encode, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION: Message = {"role": "user", "content": "1"}
_ANSWERS: tuple[Message, Message] = ({"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"})
_RESULT: Message = {"role": "tool", "content": "1"}
_WHERE = "messages that show how turns end"


class TurnEnds:
    """Finds the end token of a reply as the chat template of a tokenizer writes it, in this order:

    1. the first of `stop_token_ids` after the text of the reply;
    2. the first token of the next message, if it is one of `stop_token_ids`: GLM's templates write no end token, and
       its models stop with <|user|> or <|observation|>;
    3. the last special token after the text of the reply.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = frozenset([*tokenizer.all_special_ids, *added, *stop_token_ids])

    def learned(self, where: str, message: Message, reply: Sequence[int], following: int | None) -> list[int]:
        """Tokens that a model has to generate for `message`, including the one that ends its turn.

        `reply` is the message as tokenized by the template; `following` is the first token of the next message, or None
        at the end of the chat. Raises `UserError`, beginning with `where`, if no token ends the turn.
        """
        ends = self._behind_text(reply)
        for end in ends:
            if reply[end] in self._stops:
                return [*reply[: end + 1]]
        following = self._of_next(message) if following is None else following
        if following in self._stops:
            return [*reply, following]
        if not ends:
            raise UserError(
                f"{where}: the model's chat template ends an assistant message without a special token, and writes "
                f"none behind it at which a response ends, so a model would never learn to stop; use a template that "
                f"writes the tokenizer's end-of-sequence token"
            )
        return [*reply[: ends[-1] + 1]]

    def _behind_text(self, reply: Sequence[int]) -> list[int]:
        """Indices of the special tokens that no text of the message follows."""
        special = [place for place, token in enumerate(reply) if token in self._special]
        if not special or not self._is_markup(reply[special[-1] + 1 :]):
            return []
        ends = [special.pop()]
        while special and not self._text(reply[special[-1] + 1 : ends[0]]).strip():
            ends.insert(0, special.pop())
        return ends

    def _is_markup(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens after the last special one are white space, or the text that follows every reply."""
        text = self._text(tokens)
        return not text.strip() or text == self._behind_each

    @cached_property
    def _behind_each(self) -> str | None:
        """Text that the template writes after the last special token of any reply; None if it depends on the reply."""
        texts = set()
        for answer in _ANSWERS:
            tokens = self._tokens([_QUESTION, answer]) or []
            special = [place for place, token in enumerate(tokens) if token in self._special]
            texts.add(self._text(tokens[special[-1] + 1 :]) if special else None)
        return texts.pop() if len(texts) == 1 else None

    def _of_next(self, message: Message) -> int | None:
        """First token of a message that would follow `message` in the template; None if it cannot be determined."""
        return self._of_result if message.get("tool_calls") else self._of_question

    @cached_property
    def _of_question(self) -> int | None:
        return self._behind_answer(_QUESTION)

    @cached_property
    def _of_result(self) -> int | None:
        return self._behind_answer(_RESULT)

    def _behind_answer(self, following: Message) -> int | None:
        """First token of a message after a plain answer, since templates rewrite answers that have reasoning."""
        chat = [_QUESTION, _ANSWERS[0]]
        before, after = self._tokens(chat), self._tokens([*chat, following])
        if before is None or after is None or after[: len(before)] != before:
            return None
        return next(iter(after[len(before) :]), None)

    def _tokens(self, messages: Sequence[Message]) -> list[int] | None:
        """Tokens of a chat; None if the template refuses it."""
        try:
            text = render(self._tokenizer, messages, _WHERE, add_generation_prompt=False)
        except UserError:
            return None
        return next(encode(self._tokenizer, [text]))

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens))) if tokens else ""


def ends_of(conversations: Iterable[tuple[Sequence[int], Sequence[int]]]) -> set[int]:
    """Collect the last token of every trained turn, given (`token_ids`, `mask`) of each conversation."""
    ends = set()
    for token_ids, mask in conversations:
        learned = bytes([*mask, False])
        place = learned.find(b"\1\0")
        while place >= 0:
            ends.add(token_ids[place])
            place = learned.find(b"\1\0", place + 1)
    return ends
