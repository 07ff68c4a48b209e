"""Folders that a shell script derives from its own name."""

import os
import re
from collections.abc import Callable
from pathlib import Path

_NAME = r"\$(?:0|BASH_SOURCE|\{(?:0|BASH_SOURCE(?:\[0\])?(?::?-\$\{?0\}?)?)\})"
_AWAY = re.compile(r"\s*(?:[12&]?>\s*/dev/null|2>&1)")


def found_by_name(command: str, script: Path, source: Path, known: Callable[[str], str]) -> Path | None:
    """The folder that `dirname $0` and the like print; `script` is $0, `source` is BASH_SOURCE. None for others.

    `known` returns the value of a word, empty if it is unknown.
    """

    def of_command(text: str) -> Path | None:
        if found := re.fullmatch(r"(dirname|realpath|readlink)(?: -\w+)*(?: --)? (.+)", text):
            path = of_word(found[2])
            return path.parent if path and found[1] == "dirname" else path
        if found := re.fullmatch(r"cd(?: -\w)*(?: --)? (.+?) ?(?:&&|;) ?pwd(?: -\w)?", text):
            return of_word(found[1])
        return None

    def of_word(word: str) -> Path | None:
        if re.fullmatch(_NAME, word):
            return source if "BASH_SOURCE" in word else script
        if found := re.fullmatch(r"\$\((.+)\)((?:/[\w.-]+)*)/?", word):
            path, below = of_command(found[1]), found[2]
        else:
            text = "" if set(word) & set("();&|<>` ") else known(word)
            path, below = Path(text) if text.startswith("/") else None, ""
        return path and Path(os.path.normpath(f"{path}{below}"))

    return of_command(" ".join(_AWAY.sub("", command).replace('"', "").split()))
