"""Tool calls of a chat are in its rendering: a chat template may leave them out, as one does that knows no tools."""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.data.chat import Message, render
from megarl.data.tool_calls import of_another_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_calls(where: str, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> None:
    """Raise `UserError` where the chat template does not write the names of all functions that the assistant calls.

    It costs one rendering, with marked names: they may stand in contents and reasoning, too.
    """
    word = secrets.token_hex(8)
    marked, names = list(messages), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or "tool_calls" not in message:
            continue
        calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else [message["tool_calls"]]
        marks = [f"{word}_{number}_{place}_" for place in range(len(calls))]
        said = f"{where}, message {number}"
        changed = [of_another_function(call, mark, said) for call, mark in zip(calls, marks, strict=True)]
        marked[number] = {**message, "tool_calls": changed}
        names += [(said, mark) for mark in marks]
    if not names:
        return
    text = render(tokenizer, marked, where, add_generation_prompt=False)
    for said, mark in names:
        if mark not in text:
            raise UserError(
                f"{said}: the model's chat template leaves out a part of its 'tool_calls'; write them in "
                f"chat_template.jinja, or take that part out of the message"
            )
