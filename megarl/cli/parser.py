"""The command-line parser, whose errors are one sentence."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from converters.errors import UserError, did_you_mean

_ABOUT_AN_OPTION = {
    r"invalid int value: (.*)": r"takes a whole number, not \1",
    r"invalid float value: (.*)": r"takes a number, not \1",
    r"expected one argument": "needs a value",
    r"expected at least one argument": "needs at least one value",
    r"expected (\d+) arguments": r"needs \1 values",
    r"not allowed with argument (.*)": r"cannot be given beside \1",
    r"ignored explicit argument (.*)": r"takes no value, and \1 was given",
}
"""argparse's messages about an option (Python 3.11 to 3.13) -> ours, which follow the option's name."""
_CHOICES = re.compile(r"invalid choice: (.*) \(choose from (.*)\)")
_OF_AN_OPTION = re.compile(r"argument (\S+): (.*)", re.DOTALL)
_REQUIRED = re.compile(r"the following arguments are required: (.*)|one of the arguments (.*) is required")


class CommandParser(argparse.ArgumentParser):
    """Raises UserError where argparse would print usage and exit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._words: Sequence[str] = ()

    @property
    def own_options(self) -> list[str]:
        """The names of its long options, without the dashes."""
        return [name[2:] for name in self._option_string_actions if name.startswith("--")]

    def no_option(self, word: str) -> UserError:
        """The error for a word that looks like an option but is none."""
        advice = self.nearest(word) or f"; see {self.prog} --help"
        return UserError(f"{self.prog} has no option {word.partition('=')[0]}{advice}")

    def nearest(self, word: str) -> str:
        """The end of an error sentence about an unknown option: the closest valid option; empty if there is none."""
        return did_you_mean(word.partition("=")[0].lstrip("-"), self.own_options, "--{}") if word[:2] == "--" else ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in `argparse`; the words are kept for error messages."""
        self._words = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with a sentence for argparse's message."""
        if found := _REQUIRED.fullmatch(message):
            raise self._missing(found[1].split(", ") if found[1] else found[2].split(), one=not found[1])
        if found := _OF_AN_OPTION.fullmatch(message):
            raise UserError(f"{self._as_given(found[1])} {_say(found[2])}")
        raise UserError(f"{self.prog}: {message}")

    def _missing(self, names: Sequence[str], *, one: bool) -> UserError:
        """The error for missing options, or for an unknown word that may be a misspelling of one."""
        for word in self._words:
            flag = word.partition("=")[0]
            is_unknown = flag.startswith("--") and flag not in self._option_string_actions
            if is_unknown and did_you_mean(flag[2:], [name.lstrip("-") for name in names]):
                return self.no_option(flag)
        return UserError(f"{self.prog} needs {'one of ' * one}{', '.join(names)}; see {self.prog} --help")

    def _as_given(self, names: str) -> str:
        """The spelling that was given, out of an option's names."""
        flags = [word.partition("=")[0] for word in self._words]
        every = names.split("/")
        return next((name for name in every if name in flags), every[0])


def _say(message: str) -> str:
    if found := _CHOICES.fullmatch(message):
        value, *choices = (text.strip("'") for text in (found[1], *found[2].split(", ")))
        return f"{value} is none of {', '.join(choices)}{did_you_mean(value, choices)}"
    for pattern, sentence in _ABOUT_AN_OPTION.items():
        if found := re.fullmatch(pattern, message):
            return found.expand(sentence)
    return f"cannot be read: {message}"
