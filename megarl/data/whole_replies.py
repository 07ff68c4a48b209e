"""Replies to learn are whole in their rendering: what a chat template leaves out would never be learned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.data.chat import Message, render
from megarl.data.tool_calls import of_another_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEARNED = ("content", "reasoning_content", "thinking")
"""Texts of a message that a model is to write itself."""


def check_whole(
    where: str, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], before: str, after: str
) -> None:
    """Raise `UserError` where the text `after`, of `messages`, lacks a part of the last one: of its texts or its calls.

    The chat up to that message, with the generation prompt, is `before`.
    """
    _check_texts(where, messages[-1], before, after)
    _check_calls(where, tokenizer, messages, after)


def _check_texts(where: str, message: Message, before: str, after: str) -> None:
    """Raise `UserError` where the text `after`, of a chat that goes on after `before`, lacks a part of the message."""
    rendered = _without_spaces(after)
    start = len(_without_spaces(before)) if after.startswith(before) else 0
    for key in _LEARNED:
        text = message.get(key) or ""
        if not isinstance(text, str):
            raise UserError(f"{where}: its {key!r} must be a text, found {text!r}")
        said = _without_spaces(text)
        # The generation prompt may be the first characters of it, as <think> is.
        if said and said not in rendered[max(start - len(said) + 1, 0) :]:
            raise _left_out(
                where, key, "take the lines that cut it, such as the reasoning (look for '</think>'), out of"
            )


def _check_calls(where: str, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], after: str) -> None:
    """Raise `UserError` where the text `after`, of these messages, lacks the name of a function that the last calls."""
    last = messages[-1]
    calls = last.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    for number, call in enumerate(calls):
        # Names may stand in contents and reasoning, too, so that it does not help to look for one.
        changed = [*calls[:number], of_another_function(call, where), *calls[number + 1 :]]
        chat = [*messages[:-1], {**last, "tool_calls": changed}]
        if render(tokenizer, chat, where, add_generation_prompt=False) == after:
            raise _left_out(where, "tool_calls", "write them in")


def _left_out(where: str, key: str, advice: str) -> UserError:
    return UserError(
        f"{where}: the model's chat template leaves out a part of its {key!r}, which would never be learned; {advice} "
        f"chat_template.jinja, or take that part out of the message"
    )


def _without_spaces(text: str) -> str:
    return "".join(text.split())
