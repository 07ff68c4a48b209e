"""Built-in reward functions by name, and loading of users' own from files."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from converters.errors import UserError, did_you_mean
from megarl.rewards.scoring import UNCHECKED, RewardFunction

GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments that every reward function gets."""
GIVEN_IF_NAMED = "response_tokens"
"""Keyword argument that only functions with a parameter of this name get."""


@dataclass(frozen=True)
class Builtin:
    """A built-in reward function.

    - `where`: its "module:name".
    - `options`: preset options of this entry.
    - `check`: "module:name" of a function that raises `ValueError` for invalid options.
    - `parts`: names of the numbers that it returns beside its score.
    - `may_be_undecided`: a response can make it run forever, crash or exhaust memory; such samples, and samples that
      take more than `limit_s` seconds, score 0.
    - `truth`: "module:name" of a function of a ground truth and the options that raises `ValueError` for a ground truth
      that the reward would not accept.
    - `reads_answer`: it looks for an answer, as opposed to the form of the whole response.
    """

    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    check: str | None = None
    parts: tuple[str, ...] = ()
    limit_s: float | None = None
    may_be_undecided: bool = False
    truth: str | None = None
    reads_answer: bool = True

    @property
    def nothing(self) -> dict[str, float]:
        """Result for a response without an answer: score and all parts are 0, so that means cover all samples."""
        return {"score": 0.0, **dict.fromkeys(self.parts, 0.0)}

    @property
    def undecided(self) -> dict[str, float]:
        """Result for a sample that could not be decided."""
        return {**self.nothing, UNCHECKED: 1.0}


REWARDS: Mapping[str, Builtin] = {
    "exact_match": Builtin("megarl.rewards.text_match:exact_match"),
    "gsm8k": Builtin("megarl.rewards.text_match:gsm8k", truth="megarl.rewards.text_match:gsm8k_truth"),
    "gsm8k_flexible": Builtin(
        "megarl.rewards.text_match:gsm8k", {"method": "flexible"}, truth="megarl.rewards.text_match:gsm8k_truth"
    ),
    "numeric_match": Builtin(
        "megarl.rewards.text_match:numeric_match",
        check="megarl.rewards.text_match:check_tolerances",
        truth="megarl.rewards.text_match:numeric_truth",
    ),
    "math": Builtin(
        "megarl.rewards.math_match:math",
        limit_s=10.0,
        parts=(UNCHECKED,),
        may_be_undecided=True,
        truth="megarl.rewards.math_match:check_truth",
    ),
    "math_dapo": Builtin("megarl.rewards.math_dapo:math_dapo"),
    "multiple_choice": Builtin(
        "megarl.rewards.multiple_choice:multiple_choice",
        check="megarl.rewards.multiple_choice:check_options",
        truth="megarl.rewards.multiple_choice:right_option",
    ),
    "json_match": Builtin(
        "megarl.rewards.json_match:json_match", parts=("valid",), truth="megarl.rewards.json_match:value_of_truth"
    ),
    "json_schema": Builtin(
        "megarl.rewards.json_match:json_schema",
        limit_s=10.0,
        parts=("valid", UNCHECKED),
        may_be_undecided=True,
        truth="megarl.rewards.json_match:schema_of_truth",
    ),
    "tool_call": Builtin(
        "megarl.rewards.json_match:tool_call", parts=("names",), truth="megarl.rewards.json_match:calls_of_truth"
    ),
    "code": Builtin(
        "megarl.rewards.code:code",
        check="megarl.rewards.code:check_options",
        parts=("passed", "timed_out", UNCHECKED),
        may_be_undecided=True,
        truth="megarl.rewards.program_tests:read_truth",
    ),
    "format": Builtin(
        "megarl.rewards.form:format",
        check="megarl.rewards.form:check_pattern",
        limit_s=1.0,
        parts=(UNCHECKED,),
        may_be_undecided=True,
        reads_answer=False,
    ),
    "length_penalty": Builtin(
        "megarl.rewards.form:length_penalty", check="megarl.rewards.form:check_lengths", reads_answer=False
    ),
    "repetition_penalty": Builtin(
        "megarl.rewards.form:repetition_penalty", check="megarl.rewards.form:check_words", reads_answer=False
    ),
}
"""The built-in reward functions."""


KEY, OPTIONS_KEY = "reward.function", "reward.functions.<name>.options"


@dataclass(frozen=True)
class Source:
    """Source of a reward function: the arguments of `load_reward`."""

    spec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = KEY
    options_key: str = OPTIONS_KEY

    @property
    def builtin(self) -> Builtin | None:
        """The entry of `REWARDS`; None for a function from a file."""
        return REWARDS.get(self.spec)

    def load(self) -> RewardFunction:
        """Load the function. Raises `UserError` as `load_reward`."""
        return load_reward(self.spec, self.options, self.key, self.options_key)

    def truth_check(self) -> Callable[[Any], Any] | None:
        """Return a function that raises `ValueError` for a bad ground truth; None if it is not known which are bad."""
        if self.builtin is None or self.builtin.truth is None:
            return None
        return partial(_resolve(self.builtin.truth), **{**self.builtin.options, **self.options})


class Calling(NamedTuple):
    """How to call a reward function: whether calls return an awaitable, and whether it takes response_tokens."""

    is_async: bool
    takes_response_tokens: bool


def calling_of(function: RewardFunction) -> Calling:
    """Inspect how to call a reward function."""
    bound = getattr(function, "func", function)
    is_async = inspect.iscoroutinefunction(bound) or inspect.iscoroutinefunction(type(bound).__call__)
    return Calling(is_async, GIVEN_IF_NAMED in inspect.signature(function).parameters)


def load_reward(
    spec: str, options: Mapping[str, Any] | None = None, key: str = KEY, options_key: str = OPTIONS_KEY
) -> RewardFunction:
    """Return the reward function `spec`, with `options` bound to it.

    `spec` is a name of `REWARDS`, or path/to/file.py:name of a user's own function. `key` and `options_key` are the
    configuration keys of the two, for messages.

    Raises `UserError` for an unknown name, a file that is missing or fails to run, a name that the file does not define
    as a function with the keyword arguments data_source, solution_str, ground_truth and extra_info, and for options
    that the function does not take.
    """
    options = dict(options or {})
    file, colon, name = spec.rpartition(":")
    function = _load_from_file(Path(file), name, key) if colon else _load_builtin(spec, key)
    where = f"{key}={spec}"
    if not colon:
        options = {**REWARDS[spec].options, **options}
    _check_arguments(function, where, options, options_key)
    if not colon:
        _check_values(spec, where, options, options_key)
    return partial(function, **options) if options else function


def _load_builtin(name: str, key: str) -> RewardFunction:
    if name not in REWARDS:
        raise UserError(
            f"{key}={name!r} is not known{did_you_mean(name, REWARDS)}; it must be one of {', '.join(REWARDS)} or "
            "path/to/file.py:name"
        )
    return _resolve(REWARDS[name].where)


def _load_from_file(path: Path, name: str, key: str) -> RewardFunction:
    where = f"{key}={path}:{name}"
    if not path.is_file():
        raise UserError(f"{where}: the file does not exist (looked for {path.resolve()})")
    module_name = "megarl_user_reward_" + re.sub(r"\W", "_", path.stem)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{where}: the file must be Python source with a name that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up a class's module there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"{where}: running the file failed with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"{where}: the file has no {name!r}{did_you_mean(name, functions)}; "
            f"its functions are {', '.join(functions) or 'none'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{where}: {name!r} is a {type(function).__name__}, not a function")
    return function


def _check_arguments(function: RewardFunction, where: str, options: Mapping[str, Any], options_key: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # raised for some classes and functions in C
        raise UserError(f"{where} must take {', '.join(GIVEN)} by name, but does not say what it takes") from error
    parameters = {name: each for name, each in signature.parameters.items() if name not in (*GIVEN, GIVEN_IF_NAMED)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = [name for name, each in parameters.items() if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for option in options:
        if option not in names and (not takes_any or option in (*GIVEN, GIVEN_IF_NAMED)):
            raise UserError(
                f"{options_key}.{option} is no option of {where}{did_you_mean(option, names)}; "
                f"its options are {', '.join(names) or 'none'}"
            )
    try:
        tokens = (GIVEN_IF_NAMED,) if GIVEN_IF_NAMED in signature.parameters else ()
        signature.bind(**dict.fromkeys((*GIVEN, *tokens, *names)))
    except TypeError as error:
        shown = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise UserError(f"{where} must take {', '.join(GIVEN)} by name, but is {shown}: {error}") from error
    missing = [name for name in names if parameters[name].default is inspect.Parameter.empty and name not in options]
    if missing:
        raise UserError(f"{where} needs a value for {', '.join(missing)}: give it in {options_key}")


def _check_values(name: str, where: str, options: Mapping[str, Any], options_key: str) -> None:
    check = REWARDS[name].check
    if check is None:
        return
    try:
        _resolve(check)(**options)
    except (ValueError, TypeError) as error:
        raise UserError(f"{options_key} of {where}: {error}") from error


def _resolve(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
