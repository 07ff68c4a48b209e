"""Check that the rendering of a reply is complete: text that the chat template leaves out would never be learned."""

from converters.errors import UserError
from megarl.data.chat import Message

_LEARNED = ("content", "reasoning_content", "thinking")
"""Keys of a message whose texts the model has to generate itself."""


def check_texts(where: str, message: Message, before: str, after: str) -> None:
    """Raise `UserError` if a text of `message` is missing from its rendering.

    `before` is the rendered chat up to and including the generation prompt, `after` the chat with the message.
    """
    rendered = _without_spaces(after)
    start = len(_without_spaces(before)) if after.startswith(before) else 0
    for key in _LEARNED:
        text = message.get(key) or ""
        if not isinstance(text, str):
            raise UserError(f"{where}: its {key!r} must be a text, found {text!r}")
        said = _without_spaces(text)
        # The generation prompt may already contain the beginning of the text, such as <think>.
        if said and said not in rendered[max(start - len(said) + 1, 0) :]:
            raise UserError(
                f"{where}: the model's chat template leaves out a part of its {key!r}, which would never be learned; "
                f"take the lines that cut it, such as the reasoning (look for '</think>'), out of "
                f"chat_template.jinja, or take that part out of the message"
            )


def _without_spaces(text: str) -> str:
    return "".join(text.split())
