"""Render chat messages to text and token ids by the chat template of the model's tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.data.time_limit import CpuTimeSpentError, cpu_time_limit
from megarl.data.tool_calls import read_arguments
from megarl.rewards.nulls import holds_none

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_TODAY = date(2024, 7, 26)
"""The date that templates get as today: the default of Llama's templates.

With the clock's date, a run that resumes after midnight would have other prompts than before.
"""
_RENDER_LIMIT_S = 10.0
_TEXTS_AT_ONCE = 1024
"""Limits memory: a tokenizer's output is far larger than the token ids alone."""


def check_messages(value: object, where: str) -> list[Message]:
    """Check and normalize a chat: a non-empty list of {role: str, content: str}.

    - None or absent content beside tool calls, as in OpenAI's format, becomes "", as in vLLM.
    - Keys with the value None are removed: in parquet, every message has all keys that any message has, and templates
      test which keys exist. An empty list of tool calls is removed, too, since some templates write no content beside
      one.
    - None among the arguments of a tool call is refused, since null may be meant there. Arguments given as JSON text
      keep their nulls; they become a mapping that renders as the original text (`tool_calls.Arguments`).

    Raises `UserError` for anything else; the message begins with `where` (file, row, column).
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where} must hold a non-empty list of {{role, content}} messages, found {_shortened(value)}; "
            f"a plain text is written as [{{'role': 'user', 'content': text}}]"
        )
    return [_checked(message, f"{where}: message {number}") for number, message in enumerate(value)]


def check_prompt(value: object, where: str) -> list[Message]:
    """Return `value` as a chat that the assistant is to answer; raises `UserError` as `check_messages`.

    After a last message of the assistant, templates begin another one: the beginning of an answer would not be
    continued, and a conversation with its answer would become a prompt that gives the answer away.
    """
    messages = check_messages(value, where)
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the last message is one of the assistant, and a response begins a message of its own: take that"
            " one out"
        )
    return messages


def _checked(message: object, where: str) -> Message:
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        content = message.get("content")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if isinstance(content, str) or (content is None and calls):
            return {**_without_none(message, where), "content": content or ""}
    raise UserError(f"{where} must have a text 'role' and a text 'content', found {_shortened(message)}")


def _without_none(value: Any, where: str) -> Any:
    """Remove keys with the value None from a message, or from a part of one."""
    if isinstance(value, list):
        return [_without_none(each, where) for each in value]
    if not isinstance(value, Mapping):
        return value
    if holds_none(value.get("arguments") or ()):
        raise UserError(
            f"{where} has a call with None among its arguments, as a parquet struct has for each key that its row "
            f"lacks and another row has: give arguments as JSON text, found {_shortened(value)}"
        )
    return {
        key: read_arguments(part) if key == "arguments" else _without_none(part, where)
        for key, part in value.items()
        if part or (part is not None and key != "tool_calls")
    }


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str, *, add_generation_prompt: bool
) -> str:
    """Render a chat to text.

    Raises `UserError` if there is no chat template, if it refuses the messages or takes too long, and for a text that
    cannot be encoded as UTF-8.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer at {tokenizer.name_or_path!r} has no chat template; put a chat_template.jinja beside it"
        )
    try:
        with cpu_time_limit(_RENDER_LIMIT_S):
            text = tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                strftime_now=_TODAY.strftime,  # transformers' own reads the clock
            )
        text.encode()  # an error of the tokenizer would not name the row or the character
    except CpuTimeSpentError as error:
        raise UserError(
            f"{where}: the chat template of the model is not done with these messages after {_RENDER_LIMIT_S:g} s; "
            "correct chat_template.jinja, or take the row out"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: there is half of a character in these messages, {error.object[error.start : error.end]!r}, as "
            "in JSON text of arguments that was cut within \\ud83d\\ude00; write it whole, or take it out"
        ) from error
    except Exception as error:  # a template is third-party code and may raise anything
        raise UserError(f"{where}: the chat template of the model refuses these messages: {error}") from error
    return text


class LengthBound:
    """Detects texts that are too long without tokenizing: no token covers more characters than the longest token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    def check(self, text: str, max_tokens: int, where: str) -> None:
        """Raise `UserError` if the text certainly has more than `max_tokens` tokens."""
        if self.exceeds(text, max_tokens):
            raise UserError(
                f"{where}: the text has {len(text)} characters, which is more than {max_tokens} tokens can hold; "
                "shorten it, take the row out, or raise loop.max_tokens_per_micro_batch"
            )

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether the text certainly has more than `max_tokens` tokens. Tokenizing takes 300 x its size in memory."""
        return len(text) > max_tokens * self._longest_token


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the token ids of rendered chats, without adding special tokens: the template has written them."""
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from tokenizer(texts[start : start + _TEXTS_AT_ONCE], add_special_tokens=False)["input_ids"]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
