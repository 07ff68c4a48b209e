"""The words of a shell script, with what would be expanded in them still to be expanded; nothing is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from converters.errors import UserError
from megarl.config.foreign.shell_conditions import UNDECIDED, Block, Condition, is_test
from megarl.config.foreign.shell_words import Part, RawWord

_OPENING: Mapping[str, str] = {
    **dict.fromkeys(("for", "while", "until", "select", "{"), ""),
    "if": "test",
    "case": "word",
}
"""Keyword -> the state in which its block begins."""
_CLOSING = frozenset(("fi", "done", "esac", "}"))
_PARTS: Mapping[str, str] = {"elif": "test", "else": "body"}
_BETWEEN = frozenset(("then", "else", "elif", "do", "in", "!", "time"))
_OPERATORS = (";;&", ";&", ";;", "&&", "||")
_ENDS = frozenset(" \t\r\n;&|()<>")
_SUCCEEDING = frozenset(("cd", "mkdir", "export", "source", ".", "echo", "set"))
_SPECIAL = "@*#?$!-_"


@dataclass
class Statement:
    """A command or assignments."""

    words: list[RawWord]
    conditions: list[tuple[Condition, bool]]
    """Conditions under which it runs, and whether each has to hold; it may run once, often or never."""


class ShellScanner:
    """Goes through the text of a script once. Raises UserError, with `name` and the line, for a quote without end."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._at = 0
        self._line = 1
        self._blocks: list[Block] = []
        self._parentheses = 0
        self._chain: list[tuple[Condition, bool]] = []
        """The condition of a statement behind && or ||."""
        self._is_plain = True
        """Whether the statement has neither redirections nor arithmetic nor a `!`."""

    def statements(self) -> Iterator[Statement]:
        """The statements in their order."""
        words: list[RawWord] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\r" or self._text.startswith("\\\n", self._at):
                self._skip(1 if char != "\\" else 2)
            elif char == "#":
                self._to("\n")
            elif char in "<>":
                self._is_plain = False
                self._redirection(words)
            elif self._text.startswith("((", self._at):
                line = self._line
                words.append(RawWord(line, [Part("arithmetic", self._past_parentheses()[1:-1], False)]))
                self._is_plain = False
            elif char in "\n;&|()":
                operator = next((each for each in _OPERATORS if self._text.startswith(each, self._at)), char)
                yield from self._ended(words, operator)
                words = []
                self._skip(len(operator))
            else:
                word = self._word()
                if words or len(word.parts) > 1 or self._is_of_case(word.start) or not self._is_keyword(word.start):
                    words.append(word)
        yield from self._ended(words, "\n")

    def _is_of_case(self, word: str) -> bool:
        """Whether it is the word or a pattern of a case, where other words than esac are no keywords."""
        block = self._blocks[-1] if self._blocks else Block("")
        return block.kind == "case" and (
            block.state == "word" or (block.state == "pattern" and word not in ("esac", "in"))
        )

    def _is_keyword(self, word: str) -> bool:
        """Whether this is one at the beginning of a statement, after it has been taken notice of."""
        if word in _OPENING:
            self._blocks.append(Block(word, _OPENING[word]))
            return word not in ("for", "select")  # which set a variable
        if word in _CLOSING:
            self._blocks = self._blocks[:-1]
        elif word == "function":
            while self._text[self._at : self._at + 1] in (" ", "\t"):
                self._skip(1)
            self._word()  # its name, behind which { is a keyword
        elif word not in _BETWEEN:
            return False
        elif word == "!":
            self._is_plain = False
        elif self._blocks and self._blocks[-1].kind == "if":
            if word == "then":
                self._blocks[-1].begin_body()
            elif word in _PARTS:
                self._blocks[-1].next_part(_PARTS[word])
        return True

    def _ended(self, words: list[RawWord], operator: str) -> Iterator[Statement]:
        """The statement that ends here, and what it says of those that follow."""
        block = self._blocks[-1] if self._blocks else Block("")
        is_of_case = block.kind == "case" and block.state in ("word", "pattern")
        if is_of_case:
            self._pattern(block, words, operator)
        elif words:
            inside = [(UNDECIDED, True)] if self._parentheses else []
            yield Statement(
                words, [*(each for one in self._blocks for each in one.conditions()), *inside, *self._chain]
            )
        test = Condition(words) if self._is_plain and is_test(words) else UNDECIDED
        if block.state == "test" and (words or not self._is_plain):
            block.tests.append(test)
        if block.kind == "case" and operator == ";;":
            block.next_part("pattern")
        elif operator in (";;&", ";&"):
            # More than one part of this case may run.
            block.kind = block.state = ""
        if not is_of_case:
            self._parentheses = max(0, self._parentheses + {"(": 1, ")": -1}.get(operator, 0))
        if operator in ("&&", "||"):
            self._chain = self._follows(words, test, operator)
        elif operator != "|" and (words or operator != "\n"):
            self._chain = []
        self._is_plain = True

    def _follows(self, words: list[RawWord], test: Condition, operator: str) -> list[tuple[Condition, bool]]:
        """The condition of what is behind && or ||; a statement that is no test is taken to succeed."""
        if not self._chain and (test is not UNDECIDED or operator == "||" or not (self._is_plain and _succeeds(words))):
            return [(test, operator == "&&")]
        if not self._chain:
            return []
        ((condition, wanted),) = self._chain
        if operator == "||" and wanted and _succeeds(words):
            return [(condition, False)]
        return [(UNDECIDED, True)]

    @staticmethod
    def _pattern(block: Block, words: list[RawWord], operator: str) -> None:
        """Take the word or a pattern of a case."""
        if block.state == "word":
            if not words:
                return
            block.word, words = words[:1], words[2:]
            block.state = "pattern"
        block.patterns += words
        if operator == ")":
            block.begin_body()

    def quoted_parts(self) -> list[Part]:
        """The whole text as it counts between double quotes."""
        return self._parts_until("")

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
                word = re.escape("".join(part.text for part in target.parts))
                tabs = "\t*" if operator == "<<-" else ""
                end = re.compile(rf"\n{tabs}{word}\r?(?=\n|\Z)").search(self._text, self._at)
                if end is None:
                    raise UserError(f"{self._name}:{self._line} begins a text whose end {target.start} is not there")
                self._skip(end.end() - self._at)

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


def _succeeds(words: list[RawWord]) -> bool:
    """Whether a statement is taken to succeed."""
    if not words or words[0].start in _SUCCEEDING or re.match(r"\w+\+?=", words[0].start):
        return bool(words)
    return re.fullmatch(r".*(python[\d.]*|torchrun|\.py)", words[0].start) is not None
