"""Reward functions by name, and a user's own by file."""

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from converters.errors import UserError
from megarl.rewards.math_reward import MathReward
from megarl.rewards.scoring import RewardFunction
from megarl.rewards.text_match import exact_match, gsm8k

REWARDS: Mapping[str, Callable[[], RewardFunction]] = {
    "exact_match": lambda: exact_match,
    "gsm8k": lambda: gsm8k,
    "gsm8k_flexible": lambda: partial(gsm8k, method="flexible"),
    "math": MathReward,
}
"""Makers of the built-in reward functions: one that keeps processes is made once per run."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward(spec: str) -> RewardFunction:
    """Return the reward function `spec`: a name of `REWARDS`, or path/to/file.py:name of a user's own.

    Raises `UserError` for an unknown name, a missing file, a file that fails to run, and a name that is missing in
    it, is no function or does not take data_source, solution_str, ground_truth and extra_info by name.
    """
    file, colon, name = spec.rpartition(":")
    if colon:
        return _load_from_file(Path(file), name)
    if spec in REWARDS:
        return REWARDS[spec]()
    nearest = difflib.get_close_matches(spec, REWARDS, n=1)
    raise UserError(
        f"reward.function={spec!r} is not known{f'; did you mean {nearest[0]!r}?' if nearest else ''}; it must be one "
        f"of {', '.join(REWARDS)} or path/to/file.py:name"
    )


def _load_from_file(path: Path, name: str) -> RewardFunction:
    where = f"reward.function={path}:{name}"
    if not path.is_file():
        raise UserError(f"{where}: the file does not exist (looked for {path.resolve()})")
    module_name = "megarl_user_reward_" + re.sub(r"\W", "_", path.stem)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{where}: the file must be Python source with a name that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UserError(f"{where}: running the file failed with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        nearest = difflib.get_close_matches(name, functions, n=1)
        raise UserError(
            f"{where}: the file has no {name!r}{f'; did you mean {nearest[0]!r}?' if nearest else ''}; "
            f"its functions are {', '.join(functions) or 'none'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{where}: {name!r} is a {type(function).__name__}, not a function")
    _check_arguments(function, where)
    return function


def _check_arguments(function: RewardFunction, where: str) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise UserError(
            f"{where} must take {', '.join(_ARGUMENTS)} by name, but is {function.__name__}{signature}: {error}"
        ) from error
