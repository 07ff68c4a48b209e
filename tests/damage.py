"""Damage to a file, each kind as an accident leaves it; the same in every run."""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    draw = random.Random(f"{path.name} {len(content)}")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _change(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": _change(lambda _: b""),
    "cut in half": _change(lambda content: content[: len(content) // 2]),
    "longer by a byte": _change(lambda content: content + b"\0"),
    "a flipped bit": _flip,
    "zeros": _change(lambda content: bytes(len(content))),
}


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file below a folder with every kind of damage."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for kind in DAMAGES:
            yield str(path.relative_to(folder)), kind
