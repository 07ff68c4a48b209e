"""Tool calls of a chat are in its rendering: a chat template may leave them out, as one does that knows no tools."""

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.data.chat import Message, render
from megarl.data.tool_calls import function_of, with_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_calls(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str) -> Sequence[Message]:
    """Return the chat in the form in which the chat template writes all calls of the assistant.

    It is the chat itself, or one with None for empty content beside calls that are left out otherwise: templates of
    DeepSeek-R1 write calls there alone. Others refuse None or write it as a word, so that it comes second.

    Raises `UserError` where a template leaves out calls in both, and for arguments that are no JSON object where it
    does not write them as they are. It costs one rendering, and others where something is amiss.
    """
    lost = {number for number, _ in _unwritten(tokenizer, messages, where, "name")}
    if lost:
        messages = _without_empty_content(tokenizer, messages, where, lost)
    for number, text in _unwritten(tokenizer, messages, where, "arguments"):
        raise UserError(
            f"{where}, message {number}: the arguments of a call are no JSON object, found {text[:200]!r}, and the "
            f"model's chat template does not write them as they are; correct them, or take the row out"
        )
    return messages


def _without_empty_content(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str, lost: Collection[int]
) -> Sequence[Message]:
    """The chat with None for the empty content of `lost` messages, if the chat template then writes all calls."""
    other = [
        {**message, "content": None} if number in lost and not message["content"].strip() else message
        for number, message in enumerate(messages)
    ]
    with suppress(UserError):  # what a template says against None is not what is wrong with the row
        lost = {number for number, _ in _unwritten(tokenizer, other, where, "name")}
    if not lost:
        return other
    raise UserError(
        f"{where}, message {min(lost)}: the model's chat template leaves out a part of its 'tool_calls'; write them in "
        f"chat_template.jinja, or take that part out of the message"
    )


def _unwritten(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str, key: str
) -> list[tuple[int, str]]:
    """Texts under `key` of calls that the chat template does not write as they are, each behind its message's number.

    They are marked, since they may stand in contents and reasoning, too; arguments with a quote, for what a template
    writes as JSON comes with a backslash before it.
    """
    word, quote = secrets.token_hex(8), '"' if key == "arguments" else ""
    marked, texts = list(messages), dict[str, tuple[int, str]]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or "tool_calls" not in message:
            continue
        calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else [message["tool_calls"]]
        changed = []
        for place, call in enumerate(calls):
            function = function_of(call, f"{where}, message {number}")
            if isinstance(text := function.get(key), str):
                mark = f"{word}_{number}_{place}_{quote}"
                texts[mark] = (number, text)
                function = {**function, key: f"{text}{mark}"}
            changed.append(with_function(call, function))
        marked[number] = {**message, "tool_calls": changed}
    rendered = render(tokenizer, marked, where, add_generation_prompt=False) if texts else ""
    return [found for mark, found in texts.items() if mark not in rendered]
