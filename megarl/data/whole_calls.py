"""Check that the rendering of a chat contains all of its tool calls: a template without tools leaves them out."""

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
    """Return the chat in a form for which the chat template writes all tool calls of the assistant.

    Tries the chat itself first, then the chat with None instead of empty content beside calls that were left out:
    DeepSeek-R1's templates write calls only then, while others refuse None or write it as a word.

    Raises `UserError` if the template leaves out calls in both forms, and for arguments that are not a JSON object
    unless the template writes them verbatim. Costs one rendering, and more only if something is wrong.
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
    """Replace empty content of `lost` messages by None. Raises `UserError` unless all calls are written then."""
    other = [
        {**message, "content": None} if number in lost and not message["content"].strip() else message
        for number, message in enumerate(messages)
    ]
    with suppress(UserError):  # a template that refuses None is not what is wrong with the row
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
    """Find texts under `key` of calls that the template does not write verbatim; returns (message index, text) pairs.

    Each text is rendered with a random mark, since the same text may appear in contents or reasoning. The mark of
    arguments contains a quote, which gets a backslash if the template writes them as JSON instead of verbatim.
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
