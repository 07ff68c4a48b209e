"""Extraction of the fenced blocks of a response: ```language ... ```."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Nothing is given back (++), as spaces could be told apart in as many ways as there are: time would grow as its square.
_FENCE = re.compile(r"(?P<fence>`{3,}+)\s*+(?P<info>[^`]*+)")
_ONE_LINE = re.compile(r"```(?P<language>\w+)\s(?P<text>[^`]*)```")


class Block(NamedTuple):
    """A fenced block: the first word after the opening fence in lower case, and the text up to the closing fence."""

    language: str
    text: str


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the closed blocks of a text, in order, in one pass over its lines.

    As in CommonMark, a line with further backticks after its fence is not a fence, and a fence shorter than the one
    that opened a block is part of the block. Unlike in CommonMark, a fence with a language opens a new block even
    within another one, which then counts as never closed, and a whole block may be on one line, language first.
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
    """Return the last block in one of `languages`; else the last block that names no language; else None."""
    blocks = list(fenced_blocks(text))
    for wanted in (languages, ("",)):
        found = [block.text for block in blocks if block.language in wanted]
        if found:
            return found[-1]
    return None
