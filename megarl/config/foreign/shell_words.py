"""Words of a shell script: as written, and as passed to a program."""

import re
from dataclasses import dataclass, field

from converters.errors import UserError

UNKNOWN = re.compile("\0([^\0]*)\0")
KEPT_BLANK = "\1"
_PIECE = re.compile("(?:\0[^\0]*\0|[^ \t\r\n])+")


@dataclass(frozen=True)
class Part:
    """A part of a word."""

    kind: str
    """text, parameter (`$NAME`, `${...}`), arithmetic (`$((...))` or `((...))`) or command (`$(...)`)."""
    text: str
    quoted: bool
    """Whether blanks in its value stay in the word."""


@dataclass
class RawWord:
    """A word as written."""

    line: int
    parts: list[Part] = field(default_factory=list)
    items: "list[RawWord] | None" = None
    """The words of the array if this is `NAME=(...)`."""

    @property
    def start(self) -> str:
        """The text at its beginning, up to the first quote or expansion."""
        return self.parts[0].text if self.parts and self.parts[0] == Part("text", self.parts[0].text, False) else ""


@dataclass(frozen=True)
class Word:
    """A word as passed to a program."""

    text: str
    where: str
    """File and line."""

    @classmethod
    def missing(cls, what: str, where: str) -> "Word":
        """A word that is unknown without running the script; `what` is its text in the script."""
        return cls(f"\0{what}\0", where)

    @property
    def unknown(self) -> str:
        """The first part that is unknown without running the script."""
        found = UNKNOWN.search(self.text)
        return found[1] if found else ""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing of it is known, so that it may be no word, or several."""
        return UNKNOWN.fullmatch(self.text) is not None

    def split(self) -> "list[Word]":
        """The word split at blanks."""
        return [Word(piece, self.where) for piece in _PIECE.findall(self.text)]

    def known(self) -> str:
        """The text. Raises UserError if it is unknown."""
        if self.unknown:
            raise UserError(
                f"{self.where}: {self.unknown} has no value that can be read, and the script is not run: write the"
                " value there, or export the variable"
            )
        return self.text


@dataclass
class Row:
    """Collects the words that one word of the script expands to, part by part."""

    where: str
    words: list[Word] = field(default_factory=list)
    _text: str = ""
    _place: str = ""
    _begun: bool = False

    def end(self) -> None:
        """Finish the current word."""
        if self._begun:
            self.words.append(Word(self._text.replace(KEPT_BLANK, " "), self._place or self.where))
        self._text, self._place, self._begun = "", "", False

    def add(self, value: Word, *, is_word: bool) -> None:
        """Append to the current word; if `is_word`, an empty value is a word, too."""
        self._place = self._place or (value.where if value.text else "")
        self._text += value.text
        self._begun = self._begun or bool(value.text) or is_word

    def add_split(self, value: Word) -> None:
        """Append, splitting at blanks."""
        if value.text[:1].isspace():
            self.end()
        for number, piece in enumerate(value.split()):
            if number:
                self.end()
            self.add(piece, is_word=True)
        if value.text[-1:].isspace():
            self.end()
