"""Chat messages to text and token ids, through the chat template of the model's own tokenizer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from converters.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def check_messages(value: object, where: str) -> list[Message]:
    """Return `value` as a chat: a non-empty list of {role: str, content: str}.

    `where` (file, row, column) opens the `UserError` raised for anything else.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where} must hold a non-empty list of {{role, content}} messages, found {_shortened(value)}; "
            f"a plain text is written as [{{'role': 'user', 'content': text}}]"
        )
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(
                f"{where}: message {number} must have a text 'role' and a text 'content', found {_shortened(message)}"
            )
    return value


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], where: str, *, add_generation_prompt: bool
) -> str:
    """Return the chat as text. Raises `UserError` where there is no template or the template refuses the messages."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer at {tokenizer.name_or_path!r} has no chat template; put a chat_template.jinja beside it"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise UserError(f"{where}: the chat template of the model refuses these messages: {error}") from error


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of rendered chats; a template writes its special tokens itself, so none is added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
