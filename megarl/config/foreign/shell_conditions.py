"""Conditions of a shell script: which statements run where the values that are compared are known."""

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
"""A number in which everybody reads the same."""


@dataclass(eq=False)
class Condition:
    """A test, or patterns of a case; without words it cannot be decided."""

    words: list[RawWord] = field(default_factory=list)
    patterns: list[RawWord] | None = None
    """Patterns of a case, whose word is then the only one of `words`; None for a test."""


UNDECIDED = Condition()


def is_test(words: Sequence[RawWord]) -> bool:
    """Whether the statement is a test that can be decided, if its values are known."""
    return bool(words) and words[-1].start == _TESTS.get(words[0].start)


@dataclass
class Block:
    """A construct of the script that is still open."""

    kind: str
    """if, case, or another, whose statements may run once, often or never."""
    state: str = ""
    """test or body of an if; word, pattern or body of a case."""
    failed: list[Condition] = field(default_factory=list)
    """Conditions that do not hold where this part runs."""
    now: Condition | None = None
    """The condition that holds there."""
    tests: list[Condition] = field(default_factory=list)
    patterns: list[RawWord] = field(default_factory=list)
    word: list[RawWord] = field(default_factory=list)

    def next_part(self, state: str) -> None:
        """Go on to the part behind this one, which runs where this one does not."""
        self.failed += [self.now] if self.now else []
        self.state, self.now, self.tests, self.patterns = state, None, [], []

    def begin_body(self) -> None:
        """Begin the part that runs where the test holds, or one of the patterns fits."""
        if self.kind == "case":
            self.now = Condition(self.word, self.patterns) if self.word and self.patterns else UNDECIDED
        else:
            self.now = self.tests[0] if len(self.tests) == 1 else UNDECIDED
        self.state = "body"

    def conditions(self) -> list[tuple[Condition, bool]]:
        """The conditions under which this part runs, and whether each has to hold."""
        if self.kind not in ("if", "case"):
            return [(UNDECIDED, True)]
        return [*((each, False) for each in self.failed), *([(self.now, True)] if self.now else [])]


def holds(texts: Sequence[str]) -> bool | None:
    """Whether a test with these words holds; None where that is not known."""
    words = list(texts[1:-1])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3 or words[1] not in _COMPARED or set(words[0] + words[2]) & set("*?[~{\\"):
        return None
    are_numbers = all(NUMBER.fullmatch(each) for each in (words[0], words[2]))
    return _COMPARED[words[1]](words[0], words[2]) if are_numbers or not words[1].startswith("-") else None


def fits(text: str, patterns: Sequence[str]) -> bool | None:
    """Whether one of the patterns of a case fits; None where that is not known."""
    if set("".join(patterns)) & set("[\\"):
        return None  # which characters a bracket takes depends on the language of the shell
    return any(fnmatchcase(text, each) for each in patterns)
