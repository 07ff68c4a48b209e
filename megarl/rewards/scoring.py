"""Arguments of reward functions, their scores, and their failures."""

import math
import reprlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsFloat, TypeGuard

from converters.errors import UserError

RewardResult = float | Mapping[str, Any]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
"""Called with keyword arguments as in verl: data_source, solution_str, ground_truth, extra_info; and response_tokens
if it has a parameter of this name. A mapping must hold "score"; its other numbers become named parts."""

UNCHECKED = "unchecked"
"""Name of the part that is 1 if a built-in reward could not be decided."""
LONGEST_SCORED_CHARACTERS = 4 * 1024**2
"""Limit of the text sent to a reward function: the beginning of longer responses is cut, as answers are at the end."""

_SHOWN_CHARACTERS = 500


def reward_arguments(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], response_tokens: int = 0
) -> dict[str, Any]:
    """Build the keyword arguments of a `RewardFunction` for one response.

    `solution_str` is the text of the response without prompt and special tokens; its last `LONGEST_SCORED_CHARACTERS`
    are kept. `response_tokens` is its length in tokens, including special ones.
    """
    return {
        "data_source": data_source,
        "solution_str": solution_str[-LONGEST_SCORED_CHARACTERS:],
        "ground_truth": ground_truth,
        "extra_info": extra_info,
        "response_tokens": response_tokens,
    }


@dataclass(frozen=True)
class Score:
    """The reward of one response.

    `parts` are named numbers that are logged beside it. `terms` are its summands: each named reward times its weight; a
    single reward is the one term "score".

    Example: Score(0.9, parts={"unchecked": 0.0}, terms={"score": 1.0, "overlong": -0.1})
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def is_decided(self) -> bool:
        """Whether every built-in reward in it reached a decision."""
        return not any(value for name, value in self.parts.items() if name.split("/")[-1] == UNCHECKED)


class RewardFailed(UserError):  # noqa: N818 - says what happened
    """A reward function raised, returned no finite number, or ended its process. The details show its arguments."""

    remedy = "repair the function, or set reward.on_error=drop to leave such samples out"

    def __init__(self, arguments: Mapping[str, Any], reason: str) -> None:
        whole = arguments["solution_str"]
        solution = whole[:_SHOWN_CHARACTERS]
        cut = f" (first {_SHOWN_CHARACTERS} of {len(whole)} characters)" if len(solution) < len(whole) else ""
        super().__init__(
            f"the reward function failed: {reason}; {self.remedy}",
            f"  data_source: {arguments['data_source']!r}\n"
            f"  solution{cut}: {solution!r}\n"
            f"  ground_truth: {_shown(arguments['ground_truth'])}\n"
            f"  extra_info: {_shown(dict(arguments['extra_info']))}",
        )
        self.arguments = arguments
        self.reason = reason

    def __reduce__(self) -> tuple[type["RewardFailed"], tuple[Mapping[str, Any], str]]:
        return type(self), (self.arguments, self.reason)


class RewardTimedOut(RewardFailed):
    """A reward function exceeded its time limit."""

    remedy = "make the function faster, raise reward.timeout_s, or set reward.on_timeout to drop or zero"


class RewardLost(RewardFailed):
    """Every process that scored the sample was killed: the sample is left out, whatever `reward.on_error` is."""

    remedy = "see who kills the processes that score; the kernel does it where memory runs out (dmesg tells)"


class WeightedSumFailed(RewardFailed):
    """The weighted sum of a sample's terms is not finite."""

    remedy = "lower the weights of the terms (reward.functions), or let the functions score less"


def as_score(result: object) -> Score:
    """Convert the result of a reward function.

    Raises `ValueError` unless it is a finite number, or a mapping with a "score" in which all numbers are finite. Other
    values of a mapping are ignored.
    """
    try:
        return _read(result)
    except ValueError:
        raise
    except Exception as error:  # a user-defined mapping may raise anything
        raise ValueError(f"its result cannot be read, that raised {type(error).__name__}") from error


def _read(result: object) -> Score:
    if not isinstance(result, Mapping):
        return Score(_as_number("score", result))
    if "score" not in result:
        raise ValueError(f"its result has no 'score', only {_shown(sorted(map(str, result)))}")
    numbers = {str(name): _as_number(str(name), part) for name, part in result.items() if _is_part(name, part)}
    return Score(numbers.pop("score"), numbers)


def _is_part(name: object, part: object) -> bool:
    return name == "score" or _is_real(part)


def _is_real(value: object) -> TypeGuard[SupportsFloat]:
    # A result can be a numpy.bool_ only if numpy is loaded already: processes without it do not import it here.
    numpy = sys.modules.get("numpy")
    return isinstance(value, Real) or (numpy is not None and isinstance(value, numpy.bool_))


def _as_number(name: str, value: object) -> float:
    try:
        if _is_real(value) and math.isfinite(value):
            return float(value)
    except OverflowError:  # raised for a large integer
        pass
    raise ValueError(f"its {name!r} must be a finite number, found {_shown(value)}")


def _shown(value: object) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # raised for an integer of too many digits
        return f"a long {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _SHOWN_CHARACTERS
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 50
