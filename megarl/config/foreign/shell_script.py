"""Finds the words that a shell script passes to programs, with variables expanded; reads it without running it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converters.errors import UserError
from megarl.config.foreign.given_file import read_given
from megarl.config.foreign.shell_arithmetic import evaluate
from megarl.config.foreign.shell_conditions import Condition, fits, holds
from megarl.config.foreign.shell_folders import found_by_name
from megarl.config.foreign.shell_scanner import ShellScanner, Statement
from megarl.config.foreign.shell_words import KEPT_BLANK, UNKNOWN, Part, RawWord, Row, Word

_NAME = re.compile(r"(\w+)(\+?=)", re.ASCII)
_PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
_DECLARATIONS = frozenset(("export", "declare", "local", "readonly", "typeset"))
_LOCAL = frozenset(("local", "declare", "typeset"))
_ITEM = re.compile(r"(\w+)\[", re.ASCII)
_CHANGED = re.compile(r"(?<![=!<>])=(?!=)|(?:<<|>>)=|\+\+|--")
"""Where arithmetic changes a variable."""
_CHANGING = frozenset(("read", "let", "unset", "mapfile", "readarray", "getopts", "for", "select"))
"""Commands that set the variables that they name."""
_BRACES = re.compile(r"\{(?:[^{}]*,[^{}]*|-?\w+\.\.-?\w+(?:\.\.-?\d+)?)\}")
"""Braces that bash expands to several words."""
_HOME = re.compile(r"^~(?=/|$)")
_KEPT = re.compile("\0([0-9]+)\0")
_DEEPEST = 8
"""Maximum nesting of scripts that read each other; deeper nesting is reported as a cycle."""


_IN_A_BRANCH = "it stands in a branch or a loop of the script"
_EXPORTED = "a branch or a loop of the script sets it, and its value in the environment is taken"


@dataclass
class ShellScript:
    """Findings in a script."""

    commands: list[list[Word]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """File and line of each command."""
    certain: list[bool] = field(default_factory=list)
    """Whether each command runs exactly once for certain."""
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    variables: dict[str, Word] = field(default_factory=dict)
    grown: dict[str, list[str]] = field(default_factory=dict)
    """Array -> places where it grows in a branch or a loop, which are not counted."""
    exported: dict[str, str] = field(default_factory=dict)
    """Variables that a branch or a loop sets, whose values here are those of the environment."""
    used: set[str] = field(default_factory=set)
    """Arrays that a command uses."""
    failed_at: str = ""
    """File and line of the `exit` that ends it with an error."""

    def uncertain(self, arrays: Collection[str]) -> dict[str, list[str]]:
        """Reason -> what may add or change arguments when the script runs: places of `arrays`, and variables."""
        exported = [f"{name}={value}" for name, value in self.exported.items()]
        found = {_IN_A_BRANCH: list(self.skipped(arrays)), _EXPORTED: exported}
        return {why: what for why, what in found.items() if what}

    def skipped(self, arrays: Collection[str]) -> tuple[str, ...]:
        """Places where one of the arrays grows in a branch or a loop."""
        return tuple(place for name, places in self.grown.items() if name in arrays for place in places)


def read_script(file: Path, environment: Mapping[str, str]) -> ShellScript:
    """Read the script; variables that it does not set come from `environment`.

    Raises UserError for a file that cannot be read, and for unterminated quotes and parentheses.
    """
    reader = _Reader(environment)
    reader.read(file)
    return reader.found


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.found = ShellScript()
        self._environment = environment
        self._files: list[Path] = []
        self._not_read: list[str] = []
        self._unknown: list[str] = []
        """Unknown parts of texts that were read as statements; placeholders refer to them by index."""
        self._decided: dict[Condition, bool | None] = {}
        self._is_certain = True
        """Whether the current file and the current statement run exactly once for certain."""
        self._has_ended = False
        self._has_arguments = self._are_arguments_set = False
        """Whether $1 and $@ may be set by a function or by `set`, in the current statement and from now on."""
        self._functions: set[str] = set()
        self._sets_for_others = False
        self._set_by_functions: set[str] = set()
        """Variables that a function may set when it is called."""
        self._forgotten: set[str] = set()
        """Variables whose value is neither that of the environment nor known from the script."""

    def read(self, file: Path) -> None:
        text = read_given(file)
        if len(self._files) >= _DEEPEST:
            raise UserError(f"{file} is read by scripts that read each other {_DEEPEST} deep; name one of them")
        self._files.append(file)
        scanner = ShellScanner(text, str(file))
        for statement in scanner.statements():
            self._functions |= scanner.functions
            if statement.words[0].start == "return" and len(self._files) > 1 and self._runs(statement):
                break
            self._take(statement)
            if self._has_ended:
                break
        self._files.pop()

    def _take(self, statement: Statement) -> None:
        runs = self._runs(statement)
        if runs is False:
            return
        before, self._is_certain = self._is_certain, self._is_certain and runs is True
        self._take_running(statement)
        if statement.words[0].start in ("exit", "exec") and self._is_certain:
            # Without a program, exec redirects the output of the script itself.
            self._has_ended = statement.words[0].start == "exit" or len(statement.words) > 1
            if statement.words[0].start == "exit" and [word.start for word in statement.words[1:]] not in ([], ["0"]):
                self.found.failed_at = self._where(statement.words[0])
        self._is_certain = before

    def _take_running(self, statement: Statement) -> None:
        words = statement.words
        self._has_arguments = self._are_arguments_set or statement.may_be_of_function
        self._sets_for_others = statement.may_be_of_function and words[0].start not in _LOCAL
        self._forget_changed(words)
        if words[0].start in _DECLARATIONS:
            words = [word for word in words[1:] if _NAME.match(word.start)]
        first = next((at for at, word in enumerate(words) if not _NAME.match(word.start)), len(words))
        for word in words[:first]:
            if assignment := _NAME.match(word.start):
                # Before a program, it is an assignment for that program only.
                if first == len(words) or statement.words[0].start in _DECLARATIONS:
                    self._assign(word, assignment, not self._is_certain)
                elif words[first].start in ("source", "."):
                    self._forget(assignment[1], self._where(word))
        words = words[first:]
        if not words or statement.words[0].start in _DECLARATIONS or words[0].start in ("for", "select"):
            return
        if words[0].start in ("source", ".") and len(words) > 1:
            (path,) = self._expand(words[1]) or [Word("", "")]
            if not path.unknown and Path(path.text).is_file():
                self.read(Path(path.text))
            else:
                self._not_read.append(f"{path.where} reads {path.text or path.unknown}, which is not there")
            return
        if words[0].start == "eval":
            self._evaluate(words[1:], self._where(words[0]))
            return
        self.found.commands.append([each for word in words for each in self._expand(word)])
        self.found.places.append(self._where(words[0]))
        self.found.certain.append(self._is_certain)

    def _evaluate(self, words: list[RawWord], where: str) -> None:
        """Process the statements passed to `eval`."""
        text = " ".join(each.text for word in words for each in self._expand(word))

        def kept(unknown: re.Match[str]) -> str:
            self._unknown.append(unknown[0])
            return f"\0{len(self._unknown) - 1}\0"

        file, _, line = where.rpartition(":")
        for statement in ShellScanner(UNKNOWN.sub(kept, text), file, int(line)).statements():
            self._take(statement)

    def _forget_changed(self, words: list[RawWord]) -> None:
        """Forget the variables that a command sets in a way that is not evaluated."""
        command, where = words[0].start, self._where(words[0])
        names: list[str] = []
        if command in _CHANGING or (command == "printf" and words[1:2] and words[1].start == "-v"):
            named = words[1:2] if command in ("for", "select") else words[2:3] if command == "printf" else words[1:]
            names = [name for word in named for part in word.parts for name in re.findall(r"\b[A-Za-z_]\w*", part.text)]
        elif command in ("cd", "pushd", "popd"):
            names = ["PWD", "OLDPWD"]
        elif command in self._functions:
            names = [*self._set_by_functions]
        elif command == "set" and any(word.start in ("-", "--") for word in words[1:-1]):
            self._are_arguments_set = True
        elif item := _ITEM.match(command):
            names = [item[1]]
            self.found.arrays.setdefault(item[1], [])
            self.found.grown.setdefault(item[1], []).append(where)
            return
        for part in (part for word in words for part in word.parts if part.kind == "arithmetic"):
            names += re.findall(r"\b[A-Za-z_]\w*", part.text) if _CHANGED.search(part.text) else []
        for name in names:
            self._forget(name, where)
            if name in self.found.arrays or command in ("mapfile", "readarray", "read"):
                self.found.arrays[name] = [Word.missing(f"${name}", where)]

    def _forget(self, name: str, where: str) -> None:
        self.found.variables[name] = Word.missing(f"${name}", where)
        self._forgotten.add(name)

    def _runs(self, statement: Statement) -> bool | None:
        """Whether it runs exactly once; None if that is unknown."""
        found: list[bool | None] = []
        for condition, wanted in statement.conditions:
            # A test keeps its result, even if its branch changes the variables.
            if condition not in self._decided:
                self._decided[condition] = self._decide(condition)
            found.append(None if self._decided[condition] is None else self._decided[condition] == wanted)
        return False if False in found else None if None in found else True

    def _decide(self, condition: Condition) -> bool | None:
        parts = [part for word in (*condition.words, *(condition.patterns or [])) for part in word.parts]
        if self._grown(parts):
            return None
        words, patterns = (
            [self._joined(word.parts, self._where(word)) for word in each]
            for each in (condition.words, condition.patterns or [])
        )
        # Quoted parts of a pattern are literal text.
        quoted = [
            Part(part.kind, part.text, True) for word in condition.patterns or [] for part in word.parts if part.quoted
        ]
        if not words or set(self._joined(quoted, "").text) & set("*?["):
            return None
        if condition.patterns is None and words[0].text == "[":
            # Within [ ], an unquoted expansion may be no word, or several.
            split = [self._expand(word) for word in condition.words]
            words = [each[0] if len(each) == 1 else Word.missing("", "") for each in split]
        if any("\0" in word.text for word in (*words, *patterns)):
            return None
        texts = [word.text for word in words]
        return holds(texts) if condition.patterns is None else fits(texts[0], [each.text for each in patterns])

    def _grown(self, parts: list[Part]) -> list[str]:
        """The places where arrays in these parts grow in a branch or a loop."""
        names = (name for part in parts if part.kind != "text" for name in re.findall(r"\w+", part.text))
        return [place for name in names for place in self.found.grown.get(name, ())]

    def _assign(self, word: RawWord, assignment: re.Match[str], conditional: bool) -> None:
        name, grows = assignment[1], assignment[2] == "+="
        where = self._where(word)
        if word.items is not None:
            items = [each for item in word.items for each in self._expand(item)]
            if any(re.match(r"\[.*\]=", "".join(part.text for part in item.parts)) for item in word.items):
                items = [Word.missing(f"${name}", where)]
            if conditional:
                self.found.grown.setdefault(name, []).append(where)
                self.found.arrays.setdefault(name, [])
            else:
                self.found.arrays[name] = [*(self.found.arrays.get(name, []) if grows else []), *items]
            return
        if self._sets_for_others:
            self._set_by_functions.add(name)
        value = self._joined(_with_home(_without_start(word.parts, assignment.end())), where)
        if places := self._grown(word.parts):
            self.found.grown.setdefault(name, []).extend(places)
        before = self._variable(name, where) if grows else Word("", where)
        is_known = before is not None and not conditional
        self.found.variables[name] = (
            Word(before.text + value.text, where) if before and is_known else Word.missing(f"${name}", where)
        )

    def _where(self, word: RawWord) -> str:
        return f"{self._files[-1]}:{word.line}"

    def _joined(self, parts: list[Part], where: str) -> Word:
        """Join parts to one word, as an assignment does."""
        text = "".join(" ".join(word.text for word in self._values(part, where)) for part in parts)
        return Word(text.replace(KEPT_BLANK, " "), where)

    def _expand(self, raw: RawWord) -> list[Word]:
        """The words that a program gets for a word: none or several if it has an unquoted expansion."""
        where = self._where(raw)
        if braces := _BRACES.search(
            "".join("." if part.quoted or part.kind != "text" else part.text for part in raw.parts)
        ):
            return [Word.missing(braces[0], where)]
        row = Row(where)
        has_array = any(_is_array(part) for part in raw.parts)
        for part in _with_home(raw.parts):
            values = self._values(part, where)
            for number, value in enumerate(values):
                if number:
                    row.end()
                if part.quoted or part.kind == "text":
                    # Empty quotes are a word, but a quoted array without items is none.
                    row.add(value, is_word=not has_array or _is_array(part))
                else:
                    row.add_split(value)
        row.end()
        return row.words

    def _values(self, part: Part, where: str) -> list[Word]:
        if part.kind == "text":
            return [Word(_KEPT.sub(lambda kept: self._unknown[int(kept[1])], part.text), where)]
        if part.kind == "arithmetic":
            number = evaluate(part.text, lambda name: self._variable(name, where))
            return [Word.missing(f"$(({part.text}))", where) if number is None else Word(str(number), where)]
        if part.kind == "command":
            if re.fullmatch(r"\s*#[^\n]*\s*", part.text):
                return [Word("", where)]
            if part.text.strip() == "pwd":
                return self._parameter("PWD", where, quoted=part.quoted)
            script, source = self._files[0].resolve(), self._files[-1].resolve()
            folder = found_by_name(part.text, script, source, lambda word: self._known(word, where))
            return [Word(str(folder), where) if folder else Word.missing(f"$({part.text})", where)]
        return self._parameter(part.text, where, quoted=part.quoted)

    def _parameter(self, text: str, where: str, *, quoted: bool) -> list[Word]:
        if text[:1] in ("@", "*"):
            # The script's own arguments, of which there are none.
            return [Word.missing(f"${text}", where)] if self._has_arguments else []
        matched = _PARAMETER.fullmatch(text)
        if matched is None or (self._has_arguments and matched[1].isdigit()):
            return [Word.missing(f"${{{text}}}" if matched is None else f"${matched[1]}", where)]
        name, array, operation, default = matched.groups()
        if array:
            if name not in self.found.arrays and not operation and self._not_read:
                raise UserError(f"{where} uses the array {name}, and {self._not_read[-1]}: put that file there")
            self.found.used.add(name)
            return self._items(name, array, operation or "", default, where, quoted=quoted)
        value = self._variable(name, where)
        is_set = value is not None and bool(value.text or operation in ("-", "=", "+"))
        if operation in ("-", ":-", "=", ":="):
            found = value if is_set and value else self._default(default, where, quoted=quoted)
            if "=" in operation and not is_set:
                self.found.variables[name] = found if self._is_certain else Word.missing(f"${name}", where)
            return [found]
        if operation in ("+", ":+") and not (value and value.is_unknown):
            return [self._default(default, where, quoted=quoted)] if is_set else []
        return [value or Word.missing(f"${name}", where)]

    def _items(self, name: str, array: str, operation: str, default: str, where: str, *, quoted: bool) -> list[Word]:
        """The words of an array."""
        alone = [word for word in [self.found.variables.get(name)] if word and word.text]
        items = self.found.arrays.get(name, alone)
        if "+" in operation and items and default.strip('"') == f"${{{name}{array}}}":
            # Scripts write this for arrays that may be empty under set -u; the inner quotes keep blanks.
            return [Word(item.text.replace(" ", KEPT_BLANK), item.where) for item in items]
        if ("+" in operation) == bool(items) and operation:
            return [self._default(default, where, quoted=quoted)]
        if array == "[*]" and quoted:
            if "IFS" in self.found.variables:
                return [Word.missing(f"${{{name}[*]}}", where)]
            return [Word(" ".join(item.text for item in items), where)]
        return items

    def _variable(self, name: str, where: str) -> Word | None:
        found = self.found.variables.get(name)
        if found and found.unknown == f"${name}" and name in self._environment.keys() - self._forgotten:
            self.found.exported[name] = self._environment[name]
        elif found:
            return Word(found.text, where)
        if name in self.found.arrays:
            return next(iter(self.found.arrays[name]), Word("", where))
        return Word(self._environment[name], where) if name in self._environment else None

    def _known(self, word: str, where: str) -> str:
        """The value of an unquoted word; empty if it is unknown."""
        value = self._default(word, where, quoted=True)
        return "" if value.unknown else value.text

    def _default(self, text: str, where: str, *, quoted: bool) -> Word:
        scanner = ShellScanner(text if quoted else _HOME.sub("$HOME", text), where)
        if quoted:
            return self._joined(scanner.quoted_parts(), where)
        # Quoted blanks do not split words, even if the expansion itself is unquoted.
        pieces = (
            text.replace(" ", KEPT_BLANK) if part.quoted else text
            for part in scanner.unquoted_parts()
            for text in [" ".join(value.text for value in self._values(part, where))]
        )
        return Word("".join(pieces), where)


def _is_array(part: Part) -> bool:
    return part.kind == "parameter" and ("[@]" in part.text or part.text[:1] == "@")


def _with_home(parts: list[Part]) -> list[Part]:
    """The parts of a word, with ~ expanded."""
    begins = parts and not parts[0].quoted and re.match(r"((?:[A-Za-z_]\w*=)?)~(.*)", parts[0].text, re.ASCII)
    if not begins or (begins[2][:1] != "/" and (begins[2] or len(parts) > 1)):
        return parts
    return [Part("text", begins[1], False), Part("parameter", "HOME", True), Part("text", begins[2], False), *parts[1:]]


def _without_start(parts: list[Part], count: int) -> list[Part]:
    first, *others = parts
    return [Part("text", first.text[count:], first.quoted), *others]
