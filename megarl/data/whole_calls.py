"""Tool calls of a chat are in its rendering: a chat template may leave them out, as one does that knows no tools."""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.data.chat import Message, render
from megarl.data.tool_calls import of_another_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_calls(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str) -> Sequence[Message]:
    """Return the chat in the form in which the chat template writes all calls of the assistant.

    That is the chat itself, or one with None for empty content beside calls: templates of DeepSeek-R1 write calls there
    alone. Others refuse None or write it as a word, so that it comes second.

    Raises `UserError` where a template leaves out calls in both. It costs one rendering, a second where calls are lost.
    """
    lost = _messages_without_calls(tokenizer, messages, where)
    if not lost:
        return messages
    other = [
        {**message, "content": None} if number in lost and not message["content"].strip() else message
        for number, message in enumerate(messages)
    ]
    if other != messages and _writes_calls(tokenizer, other, where):
        return other
    raise UserError(
        f"{where}, message {min(lost)}: the model's chat template leaves out a part of its 'tool_calls'; write them in "
        f"chat_template.jinja, or take that part out of the message"
    )


def _writes_calls(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str) -> bool:
    try:
        return not _messages_without_calls(tokenizer, messages, where)
    except UserError:
        return False


def _messages_without_calls(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str
) -> frozenset[int]:
    """Numbers of the messages with a call of a function whose name the chat template does not write.

    Names are marked, since they may stand in contents and reasoning, too.
    """
    word = secrets.token_hex(8)
    marked, numbers = list(messages), dict[str, int]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or "tool_calls" not in message:
            continue
        calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else [message["tool_calls"]]
        marks = {f"{word}_{number}_{place}_": call for place, call in enumerate(calls)}
        changed = [of_another_function(call, mark, f"{where}, message {number}") for mark, call in marks.items()]
        marked[number] = {**message, "tool_calls": changed}
        numbers |= dict.fromkeys(marks, number)
    text = render(tokenizer, marked, where, add_generation_prompt=False) if numbers else ""
    return frozenset(number for mark, number in numbers.items() if mark not in text)
