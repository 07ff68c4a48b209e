"""Finding what a response puts between fences: ```language ... ```."""

from collections.abc import Iterator
from typing import NamedTuple

_FENCE = "```"


class Block(NamedTuple):
    """The language that the opening fence names, in small letters, and the lines up to the closing one."""

    language: str
    text: str


def fenced_blocks(text: str) -> Iterator[Block]:
    """The closed blocks of a text, in order; one pass over its lines."""
    language, lines = None, []
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if not stripped.startswith(_FENCE):
            lines.append(line)
        elif language is None:
            language, lines = stripped.strip("`").strip().lower(), []
        else:
            yield Block(language, "".join(lines))
            language = None


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last block of one of `languages`; without one, the last that names no language; None without either."""
    blocks = list(fenced_blocks(text))
    for wanted in (languages, ("",)):
        found = [block.text for block in blocks if block.language in wanted]
        if found:
            return found[-1]
    return None
