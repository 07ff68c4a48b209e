"""Evaluates conditions of a shell script: which statements run, if the compared values are known."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megarl.config.foreign.shell_words import RawWord

_TESTS: Mapping[str, str] = {"[": "]", "[[": "]]"}
_COMPARED: Mapping[str, Callable[[str, str], bool]] = {
    **dict.fromkeys(("=", "=="), lambda a, b: a == b),
    "!=": lambda a, b: a != b,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
}


NUMBER = re.compile(r"-?[1-9][0-9]{0,17}|0")
"""A number that every program reads as the same value."""


@dataclass(eq=False)
class Condition:
    """A test, or patterns of a case; without words it cannot be decided."""

    words: list[RawWord] = field(default_factory=list)
    patterns: list[RawWord] | None = None
    """Patterns of a case, whose word is then the only one in `words`; None for a test."""


UNDECIDED = Condition()


def is_test(words: Sequence[RawWord]) -> bool:
    """Whether the statement is a test that can be decided if its values are known."""
    return bool(words) and words[-1].start == _TESTS.get(words[0].start)


@dataclass
class Block:
    """A construct of the script that is still open."""

    kind: str
    """if, case, or any other, whose statements may run any number of times."""
    state: str = ""
    """test or body of an if; word, pattern or body of a case."""
    failed: list[Condition] = field(default_factory=list)
    """Conditions that are false where this part runs."""
    now: Condition | None = None
    """The condition that is true there."""
    tests: list[Condition] = field(default_factory=list)
    patterns: list[RawWord] = field(default_factory=list)
    word: list[RawWord] = field(default_factory=list)

    def next_part(self, state: str) -> None:
        """Continue with the next part, which runs if this one does not."""
        self.failed += [self.now] if self.now else []
        self.state, self.now, self.tests, self.patterns = state, None, [], []

    def begin_body(self) -> None:
        """Begin the part that runs if the test holds or one of the patterns matches."""
        if self.kind == "case":
            self.now = Condition(self.word, self.patterns) if self.word and self.patterns else UNDECIDED
        else:
            self.now = self.tests[0] if len(self.tests) == 1 else UNDECIDED
        self.state = "body"

    def conditions(self) -> list[tuple[Condition, bool]]:
        """The conditions under which this part runs, and whether each must be true or false."""
        if self.kind not in ("if", "case"):
            return [(UNDECIDED, True)]
        return [*((each, False) for each in self.failed), *([(self.now, True)] if self.now else [])]


def holds(texts: Sequence[str]) -> bool | None:
    """Whether a test with these words is true; None if that is unknown."""
    words = list(texts[1:-1])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3 or words[1] not in _COMPARED or set(words[0] + words[2]) & set("*?[~{\\"):
        return None
    are_numbers = all(NUMBER.fullmatch(each) for each in (words[0], words[2]))
    return _COMPARED[words[1]](words[0], words[2]) if are_numbers or not words[1].startswith("-") else None


def fits(text: str, patterns: Sequence[str]) -> bool | None:
    """Whether one of a case's patterns matches; None if that is unknown."""
    if set("".join(patterns)) & set("[\\"):
        return None  # which characters a bracket matches depends on the locale
    return any(fnmatchcase(text, each) for each in patterns)
