"""Ground truths of the reward `code`: what a program is given, and what it has to print."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_STDIN_KINDS = (None, "stdin", "stdin_stdout")


@dataclass(frozen=True)
class Test:
    """A program to run, its input, and what it has to print: in all, or as its last line."""

    program: str
    stdin: str
    expected: str
    last_line: bool = False

    def is_passed_by(self, output: str) -> bool:
        """Whether the output of a program that ended well is the expected one."""
        found = _lines(output)
        return (found[-1:] if self.last_line else found) == _lines(self.expected)


class Truth(Protocol):
    """What a ground truth asks of a program."""

    def tests(self, program: str) -> Iterator[Test]:
        """The tests of `program`, in order."""
        ...


@dataclass(frozen=True)
class TestCode:
    """Python that is run behind the program, such as asserts."""

    text: str

    def tests(self, program: str) -> Iterator[Test]:
        """The one test that this is."""
        # A program that ends early must not pass: only what runs to its end prints this.
        passed = secrets.token_hex()
        yield Test(f"{program}\n\n{self.text}\n\nprint('\\n{passed}')\n", "", passed, last_line=True)


@dataclass(frozen=True)
class Prints:
    """Texts for stdin, and the text expected on stdout for each."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    def tests(self, program: str) -> Iterator[Test]:
        """A test for each text."""
        for stdin, expected in zip(self.inputs, self.outputs, strict=True):
            yield Test(program, stdin, expected)


def read_truth(ground_truth: Any) -> Truth:
    """Read a ground truth, which may be given as JSON. Raises `ValueError` if it is of no known form."""
    value = _from_json(ground_truth)
    if isinstance(value, str) and value.strip():
        return TestCode(value)
    if isinstance(value, Mapping):
        return _prints(value.get("inputs"), value.get("outputs"), ground_truth)
    if _is_list(value) and all(isinstance(row, Mapping) for row in value):
        return _of_rows(value, ground_truth)
    raise _unknown(ground_truth)


def _from_json(ground_truth: Any) -> Any:
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith(("{", "[")):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except ValueError as error:
        raise _unknown(ground_truth, f"{error}, ") from error


def _of_rows(rows: Sequence[Mapping[str, Any]], ground_truth: Any) -> Truth:
    kinds = {row.get("testtype") for row in rows}
    if not kinds.issubset(_STDIN_KINDS):
        raise _unknown(ground_truth, f"testtype must be stdin, found {sorted(map(str, kinds))}, ")
    return _prints([row.get("input") for row in rows], [row.get("output") for row in rows], ground_truth)


def _prints(inputs: Any, outputs: Any, ground_truth: Any) -> Prints:
    if not (_is_texts(inputs) and _is_texts(outputs) and len(inputs) == len(outputs) > 0):
        raise _unknown(ground_truth)
    if not any(text.strip() for text in outputs):
        raise _unknown(ground_truth, "a program that does nothing passes all its tests, ")
    return Prints(inputs, outputs)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return _is_list(value) and all(isinstance(text, str) for text in value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _unknown(ground_truth: Any, reason: str = "") -> ValueError:
    return ValueError(
        "the ground truth of code must be test code, inputs and outputs that are lists of texts of one length, or rows "
        f"of input and output, which are texts: {reason}found {str(ground_truth)[:200]!r}"
    )
