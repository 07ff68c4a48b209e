"""Folders that a shell script finds by its own name."""

import os
import re
from pathlib import Path

_NAME = r"\$(?:0|BASH_SOURCE|\{(?:0|BASH_SOURCE(?:\[0\])?(?::?-\$\{?0\}?)?)\})"
_AWAY = re.compile(r"\s*(?:[12&]?>\s*/dev/null|2>&1)")


def found_by_name(command: str, script: Path, source: Path) -> Path | None:
    """The folder that `dirname $0` and its like say: `script` is $0, and `source` BASH_SOURCE. None for others."""
    return _of_command(" ".join(_AWAY.sub("", command).replace('"', "").split()), script, source)


def _of_command(command: str, script: Path, source: Path) -> Path | None:
    if found := re.fullmatch(r"(dirname|realpath|readlink)(?: -\w+)*(?: --)? (.+)", command):
        path = _of_word(found[2], script, source)
        return path.parent if path and found[1] == "dirname" else path
    if found := re.fullmatch(r"cd(?: -\w)*(?: --)? (.+?) ?(?:&&|;) ?pwd(?: -\w)?", command):
        return _of_word(found[1], script, source)
    return None


def _of_word(word: str, script: Path, source: Path) -> Path | None:
    if re.fullmatch(_NAME, word):
        return source if "BASH_SOURCE" in word else script
    if found := re.fullmatch(r"\$\((.+)\)((?:/[\w.-]+)*)/?", word):
        path = _of_command(found[1], script, source)
        return path and Path(os.path.normpath(f"{path}{found[2]}"))
    return None
