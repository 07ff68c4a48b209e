"""Splits a shell script into statements of words, whose expansions are not evaluated yet; nothing is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from converters.errors import UserError
from megarl.config.foreign.shell_conditions import UNDECIDED, Block, Condition, is_test
from megarl.config.foreign.shell_text import ENDS, ShellText
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
_SUCCEEDING = frozenset(("cd", "mkdir", "export", "source", ".", "echo", "set"))


@dataclass
class Statement:
    """A command or assignments."""

    words: list[RawWord]
    conditions: list[tuple[Condition, bool]]
    """Conditions under which it runs, and whether each must be true or false; if undecidable, it may run any number of
    times.
    """
    may_be_of_function: bool = False
    """Whether `$1` and `$@` may be the arguments of a function."""


class ShellScanner(ShellText):
    """Scans the statements of a script once. Raises UserError, as ShellText does, for an unterminated quote."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        super().__init__(text, name, line)
        self._is_substitution = False
        """Whether the text ends with the parenthesis that closes it."""
        self._ends_of_texts: list[tuple[int, str, re.Pattern[str]]] = []
        """Line, word and pattern of the ends of the here-documents that begin after this line."""
        self._blocks: list[Block] = []
        self._parentheses = 0
        self._chain: list[tuple[Condition, bool]] = []
        """The conditions of a statement after && or ||."""
        self.functions: set[str] = set()
        """Names of the functions defined so far."""
        self._is_plain = True
        """Whether the statement has no redirections, no arithmetic and no `!`."""

    def statements(self) -> Iterator[Statement]:
        """Yield the statements in order."""
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
            elif char == ")" and self._is_substitution and not self._parentheses and not self._is_in_case():
                break
            elif char in "\n;&|()":
                operator = next((each for each in _OPERATORS if self._text.startswith(each, self._at)), char)
                yield from self._ended(words, operator)
                words = []
                self._skip(len(operator))
                if operator == "\n":
                    self._past_texts()
            else:
                word = self._word()
                if words or len(word.parts) > 1 or self._is_of_case(word.start) or not self._is_keyword(word.start):
                    words.append(word)
        yield from self._ended(words, "\n")
        self._past_texts()

    def _is_repeated(self) -> bool:
        """Whether this is in a loop or a function, where the compared values may differ each time."""
        return any(block.kind not in ("if", "case") for block in self._blocks)

    def _is_in_case(self) -> bool:
        """Whether a parenthesis here closes a pattern of a case."""
        return bool(self._blocks) and self._blocks[-1].kind == "case" and self._blocks[-1].state == "pattern"

    def _is_of_case(self, word: str) -> bool:
        """Whether this is the word or a pattern of a case, where only esac is a keyword."""
        block = self._blocks[-1] if self._blocks else Block("")
        return block.kind == "case" and (
            block.state == "word" or (block.state == "pattern" and word not in ("esac", "in"))
        )

    def _is_keyword(self, word: str) -> bool:
        """Whether this is a keyword at the beginning of a statement; if so, update the state."""
        if word in _OPENING:
            self._blocks.append(Block(word, _OPENING[word]))
            return word not in ("for", "select")  # they set a variable
        if word in _CLOSING:
            self._blocks = self._blocks[:-1]
        elif word == "function":
            while self._text[self._at : self._at + 1] in (" ", "\t"):
                self._skip(1)
            self.functions.add(self._word().start)  # after this, { is a keyword
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
        """Yield the statement that ends here, and record its effect on the following ones."""
        block = self._blocks[-1] if self._blocks else Block("")
        is_of_case = block.kind == "case" and block.state in ("word", "pattern")
        if is_of_case:
            self._pattern(block, words, operator)
            if block.now and self._is_repeated():
                block.now = UNDECIDED
        elif words:
            inside = [(UNDECIDED, True)] if self._parentheses else []
            conditions = [*(each for one in self._blocks for each in one.conditions()), *inside, *self._chain]
            in_braces = any(one.kind == "{" for one in self._blocks)
            yield Statement(words, conditions, in_braces or bool(self._parentheses))
        test = Condition(words) if self._is_plain and is_test(words) and not self._is_repeated() else UNDECIDED
        if block.state == "test" and (words or not self._is_plain):
            block.tests.append(test)
        if block.kind == "case" and operator == ";;":
            block.next_part("pattern")
        elif operator in (";;&", ";&"):
            # More than one part of this case may run.
            block.kind = block.state = ""
        if not is_of_case:
            if operator == "(" and len(words) == 1:
                self.functions.add(words[0].start)
            self._parentheses = max(0, self._parentheses + {"(": 1, ")": -1}.get(operator, 0))
        if operator in ("&&", "||"):
            self._chain = self._follows(words, test, operator)
        elif operator != "|" and (words or operator != "\n"):
            self._chain = []
        self._is_plain = True

    def _follows(self, words: list[RawWord], test: Condition, operator: str) -> list[tuple[Condition, bool]]:
        """The conditions after && or ||; a statement that is not a test is assumed to succeed."""
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
        """Record the word or a pattern of a case."""
        if block.state == "word":
            if not words:
                return
            block.word, words = words[:1], words[2:]
            block.state = "pattern"
        block.patterns += words
        if operator == ")":
            block.begin_body()

    def _redirection(self, words: list[RawWord]) -> None:
        if words and words[-1].start.isdigit() and self._text[self._at - 1].isdigit():
            words.pop()
        operator = ""
        while self._at < len(self._text) and self._text[self._at] in "<>&|-":
            operator += self._text[self._at]
            self._skip(1)
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._skip(1)
        if self._at < len(self._text) and self._text[self._at] not in ENDS:
            target = self._word()
            if operator in ("<<", "<<-"):
                word = re.escape("".join(part.text for part in target.parts))
                tabs = "\t*" if operator == "<<-" else ""
                end = re.compile(rf"^{tabs}{word}\r?(?:\n|\Z)", re.MULTILINE)
                self._ends_of_texts.append((self._line, target.start, end))

    def _past_texts(self) -> None:
        for line, word, end in self._ends_of_texts:
            found = end.search(self._text, self._at)
            if found is None:
                raise UserError(f"{self._name}:{line} begins a text whose end {word} is not there")
            self._skip(found.end() - self._at)
        self._ends_of_texts = []

    def _past_command(self) -> str:
        """The commands between this parenthesis and the one that closes it."""
        inside = ShellScanner(self._text, self._name, self._line)
        inside._at, inside._is_substitution = self._at + 1, True
        for _ in inside.statements():
            pass
        if inside._at >= len(self._text):
            raise UserError(f"{self._name}:{self._line} opens a parenthesis that is never closed; close it")
        start = self._at
        self._skip(inside._at + 1 - start)
        return self._text[start + 1 : self._at - 1]


def _succeeds(words: list[RawWord]) -> bool:
    """Whether a statement is assumed to succeed."""
    if not words or words[0].start in _SUCCEEDING or re.match(r"\w+\+?=", words[0].start):
        return bool(words)
    return re.fullmatch(r".*(python[\d.]*|torchrun|\.py)", words[0].start) is not None
