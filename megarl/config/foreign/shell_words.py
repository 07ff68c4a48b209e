"""Words of a shell script as they are written, with what would be expanded in them still to be expanded."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """A stretch of a word."""

    kind: str
    """text, parameter (`$NAME`, `${...}`), arithmetic (`$((...))`) or command (`$(...)`)."""
    text: str
    quoted: bool
    """Whether blanks in its value stay in the word."""


@dataclass
class RawWord:
    """A word as it is written."""

    line: int
    parts: list[Part] = field(default_factory=list)
    items: "list[RawWord] | None" = None
    """The words of an array, where this is `NAME=(...)`."""

    @property
    def start(self) -> str:
        """The text that it begins with, up to the first quote or expansion."""
        return self.parts[0].text if self.parts and self.parts[0] == Part("text", self.parts[0].text, False) else ""
