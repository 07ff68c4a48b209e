"""Ground truths of the reward `code`: inputs of a program, and what it has to print or return."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_DRIVER = Path(__file__).with_name("program_driver.py").read_text()
_KEYS = ("inputs", "outputs", "fn_name")
_ROW_KEYS = ("input", "output", "testtype", "metadata")
_STDIN_KINDS = (None, "stdin", "stdin_stdout")
_FUNCTION_KIND = "functional"
_IMPORTED = [
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math"),
    *("random", "statistics", "itertools", "functools", "operator", "io", "sys", "json"),
]
_BEFORE = "\n".join(
    [
        *(f"from {name} import *" for name in [*_IMPORTED, "builtins", "typing"]),
        *(f"import {name}" for name in _IMPORTED),
        "sys.setrecursionlimit(50000)",
        "sys.set_int_max_str_digits(50000)",
    ]
)
"""Lines that LiveCodeBench runs before a program (import_string in lcb_runner/evaluation/testing_util.py).

The last line is from its compute_code_generation_metrics.py, whose process it forks for each program. LeetCode's
programs contain no imports, and other programs of the benchmark rely on these lines, too.
"""
_RUN = """
import linecache
linecache.cache[__file__] = 0, None, io.StringIO({program!r}, None).readlines(), __file__
exec(compile("".join(linecache.cache[__file__][2]), __file__, "exec", dont_inherit=True))
"""
"""Runs a program such that inspect.getsource returns the program's own source, without the lines before it."""


class Test(NamedTuple):
    """A program to run with its stdin, a check of its output after exit code 0, and the size of a right output."""

    program: str
    stdin: str
    is_right: Callable[[str], bool]
    output_bytes: int


class Truth(Protocol):
    """The tests that a ground truth has for a program."""

    @property
    def count(self) -> int:
        """The number of tests."""
        ...

    def tests(self, program: str) -> Iterator[Test]:
        """The tests of `program`, in order."""
        ...


@dataclass(frozen=True)
class TestCode:
    """Python code that is run after the program, such as asserts."""

    text: str
    count = 1

    def tests(self, program: str) -> Iterator[Test]:
        """The single test of `program`."""
        yield _driven([None], program=program, tests=self.text)


@dataclass(frozen=True)
class Prints:
    """Texts for stdin, and the expected text on stdout for each."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    @property
    def count(self) -> int:
        """The number of tests, one per text."""
        return len(self.inputs)

    def tests(self, program: str) -> Iterator[Test]:
        """The tests of `program`, one per text."""
        # The program is compiled separately, since it may begin with imports from __future__.
        main = f"{_BEFORE}\n{_RUN.format(program=program)}"
        for stdin, expected in zip(self.inputs, self.outputs, strict=True):
            yield Test(main, stdin, partial(_are_same, expected), _bytes(expected))


@dataclass(frozen=True)
class Calls:
    """Arguments of a function, and the accepted results of each call."""

    name: str
    arguments: Sequence[Sequence[Any]]
    results: Sequence[Sequence[Any]]

    @property
    def count(self) -> int:
        """The number of tests, one per call."""
        return len(self.arguments)

    def tests(self, program: str) -> Iterator[Test]:
        """The tests of `program`, one per call."""
        for arguments, results in zip(self.arguments, self.results, strict=True):
            call = {"name": self.name, "arguments": arguments}
            yield _driven(results, before=_BEFORE, program=program, call=call)


def read_truth(ground_truth: Any, **_options: Any) -> Truth:
    """Read a ground truth, which may be JSON text. Raises `ValueError` if its form is not known."""
    try:
        return _read(ground_truth)
    except ValueError as error:
        raise ValueError(
            "the ground truth of code must be test code, inputs and outputs that are lists of texts of one length, or "
            f"rows of input and output: {error}, found {str(ground_truth)[:200]!r}"
        ) from error


def _read(ground_truth: Any) -> Truth:
    value = ground_truth
    if isinstance(value, str):
        if not value.lstrip().startswith(("{", "[")):
            return _test_code(value)
        value = json.loads(value)
    if isinstance(value, Mapping):
        _check_keys(value, _KEYS)
        return _inputs_and_outputs(value.get("inputs"), value.get("outputs"), value.get("fn_name"))
    if _is_list(value) and all(isinstance(row, Mapping) for row in value):
        return _rows(value)
    raise ValueError(f"it is {type(value).__name__}")


def _test_code(text: str) -> TestCode:
    if not text.strip():
        raise ValueError("it is empty")
    return TestCode(text)


def _rows(rows: Sequence[Mapping[str, Any]]) -> Truth:
    for row in rows:
        _check_keys(row, _ROW_KEYS)
    names = {_function_of(row) for row in rows}
    if len(names) > 1:
        raise ValueError("its rows must be all of one function, or all of stdin")
    return _inputs_and_outputs([row.get("input") for row in rows], [row.get("output") for row in rows], *names)


def _function_of(row: Mapping[str, Any]) -> str | None:
    kind = row.get("testtype")
    if kind in _STDIN_KINDS:
        return None
    metadata = row.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    if kind != _FUNCTION_KIND or not isinstance(name, str):
        raise ValueError(f"testtype must be stdin, or functional beside metadata with func_name, not {kind!r}")
    return name


def _inputs_and_outputs(inputs: Any, outputs: Any, function: str | None = None) -> Truth:
    if not (_is_list(inputs) and _is_list(outputs) and len(inputs) == len(outputs) > 0):
        raise ValueError("inputs and outputs are no such lists")
    if function is not None:
        arguments = [_arguments(value) for value in inputs]
        return Calls(function, arguments, [_results(*pair) for pair in zip(inputs, outputs, strict=True)])
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise ValueError("inputs and outputs hold more than texts and there is no fn_name")
    if not any(text.strip() for text in outputs):
        raise ValueError("a program that does nothing passes all its tests")
    return Prints(inputs, outputs)


def _arguments(value: Any) -> Sequence[Any]:
    """Read the arguments of a call: one line of JSON each, as in LiveCodeBench, or a list, as in APPS."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    if not _is_list(value):
        raise ValueError("an input of a function must be a list of arguments, or a line of JSON for each")
    return list(value)


def _results(given: Any, expected: Any) -> Sequence[Any]:
    """Accepted results of a call with the input `given`: APPS wraps most, but not all, results into a list."""
    if isinstance(given, str):
        return [json.loads(expected) if isinstance(expected, str) else expected]
    return [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]


def _driven(results: Sequence[Any], *, program: str, before: str = "", tests: str = "", call: Any = None) -> Test:
    # A program that exits early must not pass: the token is printed only after everything has run.
    token = secrets.token_hex()
    request = {"before": before, "program": program, "tests": tests, "call": call, "token": token}
    return Test(_DRIVER, json.dumps(request), partial(_is_result, token, results), _bytes(json.dumps(results)))


def _is_result(token: str, results: Sequence[Any], output: str) -> bool:
    """Whether the last line of `output` is the token followed by one of `results`."""
    last = _lines(output)[-1]
    if not last.startswith(token):
        return False
    try:
        return json.loads(last.removeprefix(token)) in results
    except (ValueError, RecursionError):
        # The program controls this text, which may be an integer with too many digits or nested too deeply.
        return False


def _are_same(expected: str, output: str) -> bool:
    """Whether both texts have equal lines, as text or as numbers word by word: LiveCodeBench's comparison."""
    lines, right = _lines(output), _lines(expected)
    return len(lines) == len(right) and all(
        one == other or _are_same_numbers(one, other) for one, other in zip(lines, right, strict=True)
    )


def _are_same_numbers(line: str, other: str) -> bool:
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in other.split()]
    except InvalidOperation:
        return False


def _lines(text: str) -> list[str]:
    # Not splitlines(), which also splits at U+2028 and others, and a line or a JSON string may contain these.
    return [line.strip() for line in text.strip().split("\n")]


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _check_keys(value: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key, inner in value.items() if key not in known and inner is not None]:
        raise ValueError(f"{', '.join(map(str, unknown))} is not known, only {', '.join(known)}")
