"""Chat messages to text and token ids, through the chat template of the model's own tokenizer."""

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
"""Day that every template is told is today: the one that Llama's templates write where they are told none.

With the clock's, a run that goes on after midnight would have other prompts than those it began with.
"""
_RENDER_LIMIT_S = 10.0
_TEXTS_AT_ONCE = 1024
"""Tokenizers answer with far more than the tokens of a text."""


def check_messages(value: object, where: str) -> list[Message]:
    """Return `value` as a chat: a non-empty list of {role: str, content: str}.

    Content that is None or absent beside tool calls, as in OpenAI's form, becomes an empty text, as in vLLM.
    Keys of None are left out: in parquet a message has every key that any other has, and templates ask which are there;
    so is an empty list of tool calls, beside which some write no content.
    Among the arguments of a tool call they are refused, since there null may be meant; JSON text of arguments becomes
    a mapping, in which null stays, and which is that text where a template wants one.
    `where` (file, row, column) opens the `UserError` raised for anything else.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where} must hold a non-empty list of {{role, content}} messages, found {_shortened(value)}; "
            f"a plain text is written as [{{'role': 'user', 'content': text}}]"
        )
    return [_checked(message, f"{where}: message {number}") for number, message in enumerate(value)]


def _checked(message: object, where: str) -> Message:
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        content = message.get("content")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if isinstance(content, str) or (content is None and calls):
            return {**_without_none(message, where), "content": content or ""}
    raise UserError(f"{where} must have a text 'role' and a text 'content', found {_shortened(message)}")


def _without_none(value: Any, where: str) -> Any:
    """A message, or a part of it, without keys of None."""
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
    """Return the chat as text.

    Raises `UserError` where there is no template, where it refuses the messages, and for a text that UTF-8 cannot hold.
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
                strftime_now=_TODAY.strftime,  # in place of transformers' own, which asks the clock
            )
        text.encode()  # tokenizers say neither where the text is from nor what is wrong with it
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
    except Exception as error:  # a template is a program that others wrote
        raise UserError(f"{where}: the chat template of the model refuses these messages: {error}") from error
    return text


class LengthBound:
    """Tells without tokenising that a text is too long: no token stands for more characters than the longest has."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    def check(self, text: str, max_tokens: int, where: str) -> None:
        """Raise `UserError` for a text that cannot be of `max_tokens` or fewer."""
        if self.exceeds(text, max_tokens):
            raise UserError(
                f"{where}: the text has {len(text)} characters, which is more than {max_tokens} tokens can hold; "
                "shorten it, take the row out, or raise loop.max_tokens_per_micro_batch"
            )

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text cannot be of `max_tokens` or fewer. Tokenising it would take 300 times its size of memory."""
        return len(text) > max_tokens * self._longest_token


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the token ids of rendered chats; a template writes its special tokens itself, so none is added."""
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from tokenizer(texts[start : start + _TEXTS_AT_ONCE], add_special_tokens=False)["input_ids"]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
