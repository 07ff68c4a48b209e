"""Finds shared prefixes of a batch's sequences, as far as the controller can tell."""

from collections.abc import Sequence
from typing import TypeAlias

from megarl.data.stretches import StoredArray, Values, fetch
from megatron_ext.packing.prefix_tree import Prefixes, common_tokens

_Away: TypeAlias = tuple[int, int, int]
"""Number of an array in the object store, and start and end of a slice of it."""
_Key: TypeAlias = tuple[bytes | _Away, ...]
"""Local tokens (4 bytes each) and remote slices, alternating; the first entry is local."""


def prefixes_of(sequences: Sequence[Values]) -> Prefixes:
    """Find the prefixes; remote tokens count as equal if they are the same slice of the same array."""
    numbers: dict[object, int] = {}
    return Prefixes.by_key([_key(each, numbers) for each in sequences], _common)


def _key(values: Values, numbers: dict[object, int]) -> _Key:
    pieces: list[bytes | _Away] = []
    tokens = bytearray()
    for stretch in values:
        if isinstance(stretch, StoredArray):
            number = numbers.setdefault(stretch.reference, len(numbers))
            pieces += [bytes(tokens), (number, stretch.start, stretch.start + stretch.length)]
            tokens.clear()
        else:
            # Big-endian bytes of non-negative integers sort like the integers.
            tokens += fetch(stretch).astype(">u4").tobytes()
    return (*pieces, bytes(tokens))


def _common(a: _Key, b: _Key) -> int:
    found = 0
    for one, other in zip(a, b, strict=False):
        if isinstance(one, bytes) and isinstance(other, bytes):
            found += common_tokens(one, other)
        elif isinstance(one, tuple) and isinstance(other, tuple) and one[:2] == other[:2]:
            found += min(one[2], other[2]) - one[1]
        if one != other:
            break
    return found
