"""The words of a shell script, with what would be expanded in them still to be expanded; nothing is run."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from converters.errors import UserError

_OPENING = frozenset(("if", "for", "while", "until", "case", "select", "{"))
_CLOSING = frozenset(("fi", "done", "esac", "}"))
_BETWEEN = frozenset(("then", "else", "elif", "do", "in", "!", "time"))
_ENDS = frozenset(" \t\r\n;&|()<>")
_SPECIAL = "@*#?$!-_"


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


@dataclass
class Statement:
    """A command or assignments."""

    words: list[RawWord]
    conditional: bool
    """Whether it stands in a loop, a branch or a function, so that it may run once, often or never."""


class ShellScanner:
    """Goes through the text of a script once. Raises UserError, with `name` and the line, for a quote without end."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._at = 0
        self._line = 1

    def statements(self) -> Iterator[Statement]:
        """The statements in their order."""
        depth = parentheses = 0
        words: list[RawWord] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\r" or self._text.startswith("\\\n", self._at):
                self._skip(1 if char != "\\" else 2)
            elif char == "#":
                self._to("\n")
            elif char in "<>":
                self._redirection(words)
            elif self._text.startswith("((", self._at):
                self._past_parentheses()
            elif char in "\n;&|()":
                yield from self._ended(words, depth + parentheses)
                words = []
                parentheses = max(0, parentheses + {"(": 1, ")": -1}.get(char, 0))
                self._skip(1)
            else:
                word = self._word()
                keyword = "" if words else word.start
                depth = max(0, depth + (keyword in _OPENING) - (keyword in _CLOSING))
                if keyword not in _OPENING | _CLOSING | _BETWEEN or len(word.parts) > 1:
                    words.append(word)
        yield from self._ended(words, depth + parentheses)

    def quoted_parts(self) -> list[Part]:
        """The whole text as it counts between double quotes."""
        return self._parts_until("")

    def _ended(self, words: list[RawWord], depth: int) -> Iterator[Statement]:
        if words:
            yield Statement(words, depth > 0)

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _to(self, end: str) -> str:
        """The text up to `end`, which is where it goes on."""
        stop = self._text.find(end, self._at)
        found = self._text[self._at : stop if stop >= 0 else len(self._text)]
        self._skip(len(found))
        return found

    def _redirection(self, words: list[RawWord]) -> None:
        if words and words[-1].start.isdigit() and self._text[self._at - 1].isdigit():
            words.pop()
        operator = ""
        while self._at < len(self._text) and self._text[self._at] in "<>&|-":
            operator += self._text[self._at]
            self._skip(1)
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._skip(1)
        if self._at < len(self._text) and self._text[self._at] not in _ENDS:
            target = self._word()
            if operator in ("<<", "<<-"):
                self._to(f"\n{''.join(part.text for part in target.parts)}\n")

    def _past_parentheses(self) -> str:
        """The text between the parenthesis here and the one that closes it."""
        depth, start, line = 0, self._at, self._line
        while self._at < len(self._text):
            char = self._text[self._at]
            depth += {"(": 1, ")": -1}.get(char, 0)
            self._skip(1)
            if depth == 0:
                return self._text[start + 1 : self._at - 1]
        raise UserError(f"{self._name}:{line} opens a parenthesis that is never closed; close it")

    def _word(self) -> RawWord:
        word = RawWord(self._line)
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "(" and word.start.endswith("="):
                word.items = self._array()
                return word
            if char in _ENDS:
                return word
            word.parts += self._next_parts(char)
        return word

    def _array(self) -> list[RawWord]:
        line = self._line
        items: list[RawWord] = []
        self._skip(1)
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == ")":
                self._skip(1)
                return items
            if char in " \t\r\n":
                self._skip(1)
            elif self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif char == "#":
                self._to("\n")
            elif char in _ENDS:
                raise UserError(f"{self._name}:{self._line} has {char} in an array; put it in quotes")
            else:
                items.append(self._word())
        raise UserError(f"{self._name}:{line} begins an array that is never closed; close it with )")

    def _next_parts(self, char: str) -> list[Part]:
        """The parts that begin here, outside of quotes."""
        if char == "'":
            return [Part("text", self._quoted("'"), True)]
        if char == '"':
            self._skip(1)
            return [Part("text", "", True), *self._parts_until('"')]
        if char in "$`":
            return [self._expansion(quoted=False)]
        if char == "\\":
            escaped = self._text[self._at + 1 : self._at + 2]
            self._skip(2)
            return [] if escaped in ("\n", "") else [Part("text", escaped, True)]
        start = self._at
        while (
            self._at < len(self._text) and self._text[self._at] not in "'\"$`\\" and (self._text[self._at] not in _ENDS)
        ):
            self._skip(1)
        return [Part("text", self._text[start : self._at], False)]

    def _quoted(self, quote: str) -> str:
        line = self._line
        self._skip(1)
        found = self._to(quote)
        if self._at >= len(self._text):
            raise UserError(f"{self._name}:{line} opens a quote {quote} that is never closed; close it")
        self._skip(1)
        return found

    def _parts_until(self, end: str) -> list[Part]:
        """The parts up to the quote `end`, which is passed."""
        line, text = self._line, ""
        parts: list[Part] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                self._skip(1)
                return [*parts, Part("text", text, True)]
            if char in "$`":
                parts += [Part("text", text, True), self._expansion(quoted=True)]
                text = ""
            elif char == "\\" and self._text[self._at + 1 : self._at + 2] in tuple('$`"\\\n'):
                self._skip(2)
                text += self._text[self._at - 1].replace("\n", "")
            else:
                text += char
                self._skip(1)
        if end:
            raise UserError(f"{self._name}:{line} opens a quote {end} that is never closed; close it")
        return [*parts, Part("text", text, True)]

    def _expansion(self, *, quoted: bool) -> Part:
        if self._text[self._at] == "`":
            return Part("command", self._quoted("`"), quoted)
        self._skip(1)
        following = self._text[self._at : self._at + 1]
        if following == "(":
            inside = self._past_parentheses()
            is_arithmetic = inside.startswith("(") and inside.endswith(")")
            return Part("arithmetic", inside[1:-1], quoted) if is_arithmetic else Part("command", inside, quoted)
        if following == "{":
            return Part("parameter", self._braces(), quoted)
        start = self._at
        if following and (following in _SPECIAL.replace("_", "") or following.isdigit()):
            self._skip(1)
        else:
            while self._at < len(self._text) and (self._text[self._at].isalnum() or self._text[self._at] == "_"):
                self._skip(1)
        name = self._text[start : self._at]
        return Part("parameter", name, quoted) if name else Part("text", "$", quoted)

    def _braces(self) -> str:
        depth, start, line = 0, self._at, self._line
        while self._at < len(self._text):
            depth += {"{": 1, "}": -1}.get(self._text[self._at], 0)
            self._skip(1)
            if depth == 0:
                return self._text[start + 1 : self._at - 1]
        raise UserError(f"{self._name}:{line} opens a brace that is never closed; close it")
