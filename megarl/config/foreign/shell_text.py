"""Splits the text of a shell script into words, whose expansions are not evaluated yet."""

import re
from abc import ABC, abstractmethod

from converters.errors import UserError
from megarl.config.foreign.shell_words import Part, RawWord

ENDS = frozenset(" \t\r\n;&|()<>")
"""Characters that end a word outside of quotes."""
_SPECIAL = "@*#?$!-"


class ShellText(ABC):
    """Reads words from the text of a script. Raises UserError, with `name` and the line, for an unterminated quote."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        self._text, self._name = text, name
        self._at = 0
        self._line = line

    def quoted_parts(self) -> list[Part]:
        """Parse the whole text as a variable's default in double quotes."""
        return self._parts_until("")

    def unquoted_parts(self) -> list[Part]:
        """Parse the whole text as a variable's default outside of quotes, where blanks, ; and & are text."""
        parts: list[Part] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in ENDS:
                parts.append(Part("text", char, False))
                self._skip(1)
            else:
                parts += self._next_parts(char)
        return parts

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _to(self, end: str) -> str:
        """The text up to `end`, where reading continues."""
        stop = self._text.find(end, self._at)
        found = self._text[self._at : stop if stop >= 0 else len(self._text)]
        self._skip(len(found))
        return found

    @abstractmethod
    def _past_command(self) -> str:
        """The commands between this parenthesis and the one that closes it; only a scanner of statements finds that."""

    def _past_parentheses(self) -> str:
        """The text between this parenthesis and the one that closes it."""
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
            if char in ENDS:
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
            elif char in ENDS:
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
            self._at < len(self._text) and self._text[self._at] not in "'\"$`\\" and (self._text[self._at] not in ENDS)
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
        """The parts up to the closing quote `end`, which is skipped."""
        line, text = self._line, ""
        parts: list[Part] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                self._skip(1)
                return [*parts, Part("text", text, True)]
            if char == '"':
                self._skip(1)  # quotes of a default that is quoted itself
            elif char in "$`":
                parts += [Part("text", text, True), self._expansion(quoted=True)]
                text = ""
            elif char == "\\" and self._text[self._at + 1 : self._at + 2] in tuple('$`"\\\n' if end else '$`"\\\n}'):
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
        if self._text.startswith("((", self._at) and (arithmetic := self._arithmetic()):
            return Part("arithmetic", arithmetic, quoted)
        if following == "(":
            return Part("command", self._past_command(), quoted)
        if following == "{":
            return Part("parameter", self._braces(quoted=quoted), quoted)
        if following == "[":
            inside = self._to("]")[1:]
            self._skip(1)
            return Part("arithmetic", inside, quoted)
        if following in ("'", '"') and not quoted:
            return self._quoted_behind_dollar(following)
        start = self._at
        if following and (following in _SPECIAL or following.isdigit()):
            self._skip(1)
        else:
            while self._at < len(self._text) and (self._text[self._at].isalnum() or self._text[self._at] == "_"):
                self._skip(1)
        name = self._text[start : self._at]
        return Part("parameter", name, quoted) if name else Part("text", "$", quoted)

    def _quoted_behind_dollar(self, quote: str) -> Part:
        """The text of $'...', known if it has no backslash, or the beginning of $"...", which is not translated."""
        if quote == '"':
            return Part("text", "", True)
        found = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self._text, self._at)
        if found is None:
            raise UserError(f"{self._name}:{self._line} opens a quote ' that is never closed; close it")
        self._skip(len(found[0]))
        return Part("command", f"printf {found[0]}", True) if "\\" in found[1] else Part("text", found[1], True)

    def _arithmetic(self) -> str:
        """The text between (( and )) here; empty if they are parentheses of commands."""
        start, line = self._at, self._line
        inside = self._past_parentheses()
        if inside.startswith("(") and inside.endswith(")"):
            return inside[1:-1]
        self._at, self._line = start, line
        return ""

    def _braces(self, *, quoted: bool) -> str:
        """The text between this brace and the one that closes it."""
        start, line = self._at + 1, self._line
        self._skip(1)
        # In double quotes, a default may contain single quotes as text, a pattern may not.
        is_default = quoted and re.compile(r"\w+(\[[@*]\])?:?[-=+?]").match(self._text, start)
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "}":
                self._skip(1)
                return self._text[start : self._at - 1]
            if char == "\\":
                self._skip(2)
            elif char == "'" and not is_default:
                self._quoted(char)
            elif char == '"':
                self._skip(1)
                self._parts_until('"')
            elif char in "$`":
                self._expansion(quoted=quoted)
            else:
                self._skip(1)
        raise UserError(f"{self._name}:{line} opens a brace that is never closed; close it")
