"""Reads a program's arguments, `--name value ...`, from a script or a YAML file."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from converters.errors import UserError
from megarl.config.foreign.engine_arguments import OF_SLIME
from megarl.config.foreign.given_file import read_given, yaml_errors_in_a_sentence
from megarl.config.foreign.shell_script import ShellScript, read_script
from megarl.config.foreign.shell_words import Word
from megarl.config.foreign.switches import WITHOUT_VALUE

_ARGUMENT = re.compile(r"--|[+~]*\w+(\.\w+)+=")
"""An argument of slime or Megatron-LM, or a setting of verl."""


@dataclass(frozen=True)
class Argument:
    """One argument with its values."""

    name: str
    """Without leading dashes, and with underscores inside."""
    values: tuple[Word, ...]
    where: str
    """File and line."""

    @property
    def flag(self) -> str:
        """The argument as written."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def words(self) -> list[str]:
        """The values. Raises UserError if one is unknown."""
        return [value.known() for value in self.values]

    @property
    def unknown(self) -> str:
        """The first value that is unknown without running the script."""
        return next((value.unknown for value in self.values if value.unknown), "")


@dataclass(frozen=True)
class ArgumentList:
    """All arguments of a file."""

    arguments: tuple[Argument, ...]
    uncertain: Mapping[str, list[str]] = field(default_factory=dict)
    """Reason -> places of arguments that the script may or may not add, and variables that it may set."""
    program: Word | None = None
    """The module or file that gets the arguments, if they come from a script that starts one."""


@dataclass(frozen=True)
class Program:
    """A Python program that a script starts."""

    name: Word
    """Its module or file."""
    is_certain: bool
    """Whether it runs exactly once for certain."""
    words: list[Word]
    """Its arguments."""

    @property
    def texts(self) -> list[str]:
        """Its name and its arguments, as text."""
        return [word.text for word in (self.name, *self.words)]


def read_arguments(
    file: Path, environment: Mapping[str, str], counts: Callable[[Word], bool] | None = None
) -> ArgumentList:
    """Read the arguments in a YAML file or a shell script.

    In a script, they are those of the last Python program that it starts, among those accepted by `counts`. If it
    starts none, they are in the arrays, variables or lines that hold arguments.

    Raises UserError for a file that cannot be read or has no argument.
    """
    if file.suffix in (".yaml", ".yml"):
        found = ArgumentList(tuple(_arguments_of_yaml(file)))
    else:
        script = read_script(file, environment)
        program = last_program(script, counts)
        words, arrays = (program.words, script.used) if program else _words_without_program(script)
        found = ArgumentList(tuple(_arguments(words)), script.uncertain(arrays), program.name if program else None)
    if not found.arguments:
        raise UserError(f"{file} has no arguments: name a script with --ARGUMENTS, or a YAML file")
    return found


def last_program(script: ShellScript, counts: Callable[[Word], bool] | None = None) -> Program | None:
    """The last Python program of a script, among those accepted by `counts` if any are; None if it starts none.

    Raises UserError for a statement after a program that begins with arguments, for a script that exits with an error
    before, and if only running the script would tell which of several programs is the last.
    """
    found: list[Program] = []
    for command, where, is_certain in zip(script.commands, script.places, script.certain, strict=True):
        if found and command and _ARGUMENT.match(command[0].text):
            raise UserError(
                f"{where}: these arguments are given to no program: a backslash is missing at the end of the line"
                " before, or a comment stands there"
            )
        for number, word in enumerate(command):
            is_module = number and command[number - 1].text == "-m" and not word.text.startswith("torch.distributed")
            if word.text.endswith(".py") or is_module:
                found.append(Program(word, is_certain, command[number + 1 :]))
                break
    if not found and script.failed_at:
        raise UserError(
            f"{script.failed_at} ends the script before a program starts: export the variables that it asks for there"
        )
    if not found:
        return None
    programs = [program for program in found if counts is None or counts(program.name)] or found
    last = programs[-1]
    others = [each for each in programs if each.texts != last.texts]
    if others and not last.is_certain:
        raise UserError(
            f"{others[-1].name.where} and {last.name.where} start programs, and only running the script would tell"
            " which one trains: leave one of them"
        )
    return last


def _words_without_program(script: ShellScript) -> tuple[Iterable[Word], Collection[str]]:
    """The words that count if no program gets arguments, and the arrays that they are from."""
    arrays = {name: words for name, words in script.arrays.items() if words and words[0].text.startswith("--")}
    if arrays:
        return [word for words in arrays.values() for word in words], arrays
    lines = [command for command in script.commands if command and command[0].text.startswith("--")]
    if lines:
        return [word for line in lines for word in line], ()
    variables = [value for value in script.variables.values() if value.text.lstrip().startswith("--")]
    return [word for value in variables for word in value.split()], ()


def _arguments(words: Iterable[Word]) -> Iterator[Argument]:
    """Split the words at the flags. Raises UserError for words that belong to none."""
    flag: Word | None = None
    values: list[Word] = []
    for word in words:
        if not word.text.startswith("--"):
            if flag is None:
                raise UserError(f"{word.where}: {word.known()!r} belongs to no argument; arguments begin with --")
            values.append(word)
            continue
        if flag:
            yield _argument(flag, values)
        flag, values = word, []
    if flag:
        yield _argument(flag, values)


def _argument(flag: Word, words: Sequence[Word]) -> Argument:
    """The argument with its values. Raises UserError for a word after them that may be arguments itself."""
    text, equals, value = flag.text.partition("=")
    name = Word(text, flag.where).known()[2:].replace("-", "_")
    values = (*((Word(value, flag.where),) if equals else ()), *words)
    for word in values[0 if WITHOUT_VALUE & {name, name.removeprefix("no_")} else 1 :]:
        is_list_of_engine = name.startswith(OF_SLIME[1]) and word.unknown.startswith("$(")
        if word.is_unknown and not is_list_of_engine:
            word.known()
    return Argument(name, values, flag.where)


def _arguments_of_yaml(file: Path) -> Iterator[Argument]:
    with yaml_errors_in_a_sentence(file):
        root = yaml.compose(read_given(file), Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{file} has no arguments: YAML with NAME: VALUE belongs there")
    yield from _leaves(root, file)


def _leaves(node: yaml.MappingNode, file: Path) -> Iterator[Argument]:
    """The leaves of nested groups, as in Megatron-LM's --yaml-cfg and the configurations of its tests."""
    for key, value in node.value:
        # Environment variables are not arguments.
        if isinstance(value, yaml.MappingNode) and key.value != "ENV_VARS":
            yield from _leaves(value, file)
        elif not isinstance(value, yaml.MappingNode):
            yield from _of_value(key.value.removeprefix("--"), value, f"{file}:{key.start_mark.line + 1}")


def _of_value(name: str, node: yaml.Node, where: str) -> Iterator[Argument]:
    value: Any = yaml.SafeLoader("").construct_object(node, deep=True)
    name = name.replace("-", "_")
    if value is None:
        return
    if value is False:
        yield Argument(f"no_{name}", (), where)
        return
    values = [] if value is True else value if isinstance(value, list) else [value]
    yield Argument(name, tuple(Word(str(each), where) for each in values), where)


def number_or_text(word: str) -> Any:
    """Convert the word to a number if it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
