"""Finding what a response puts between fences: ```language ... ```."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"(?P<fence>`{3,})\s*(?P<info>[^`]*)")
_ONE_LINE = re.compile(r"```(?P<language>\w+)\s(?P<text>[^`]*)```")


class Block(NamedTuple):
    """The language, the first word of the opening fence, in small letters, and the lines up to the closing one."""

    language: str
    text: str


def fenced_blocks(text: str) -> Iterator[Block]:
    """The closed blocks of a text, in order; one pass over its lines.

    As in CommonMark, a line with backticks behind its fence is no fence, and a fence shorter than the one that opened a
    block is part of it. Other than there, a fence with a language opens a block also within another, which then was
    never closed; and a whole block may stand on one line, language first.
    """
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.strip())
        if opened is None and (whole := _ONE_LINE.fullmatch(line.strip())):
            yield Block(whole["language"].lower(), whole["text"].strip())
        elif fence is None or (opened is not None and len(fence["fence"]) < len(opened["fence"])):
            lines.append(line)
        elif opened is None or fence["info"]:
            opened, lines = fence, []
        else:
            yield Block(_language(opened["info"]), "".join(lines))
            opened = None


def _language(info: str) -> str:
    return info.split()[0].lower() if info else ""


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last block of one of `languages`; without one, the last that names no language; None without either."""
    blocks = list(fenced_blocks(text))
    for wanted in (languages, ("",)):
        found = [block.text for block in blocks if block.language in wanted]
        if found:
            return found[-1]
    return None
