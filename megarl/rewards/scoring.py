"""Scoring many responses at once, with a function that may be plain or async."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from converters.errors import UserError

RewardResult = float | Mapping[str, Any]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
"""Called with the keywords data_source, solution_str, ground_truth, extra_info, as verl calls it. A mapping must hold
"score"; its other numbers become named parts."""

_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class RewardSample:
    """One response to score: `solution` is the response's text, without its prompt and special tokens."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The reward of one response and the named numbers the function gave beside it."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


class RewardFailed(Exception):  # noqa: N818 - says what happened
    """A reward function raised, or gave no finite number. The message holds the sample."""

    def __init__(self, sample: RewardSample, reason: str) -> None:
        solution = sample.solution[:_SHOWN_CHARACTERS]
        cut = (
            f" (first {_SHOWN_CHARACTERS} of {len(sample.solution)} characters)" if solution != sample.solution else ""
        )
        super().__init__(
            f"the reward function failed: {reason}\n"
            f"  data_source: {sample.data_source!r}\n"
            f"  solution{cut}: {solution!r}\n"
            f"  ground_truth: {sample.ground_truth!r}\n"
            f"  extra_info: {dict(sample.extra_info)!r}\n"
            f"repair the function, or set reward.on_error=drop to leave such samples out"
        )
        self.sample = sample
        self.reason = reason

    def __reduce__(self) -> tuple[type["RewardFailed"], tuple[RewardSample, str]]:
        return type(self), (self.sample, self.reason)


async def score_all(
    function: RewardFunction, samples: Sequence[RewardSample], *, workers: int, on_error: str
) -> list[Score | None]:
    """Score `samples`, at most `workers` at a time; entry i of the result belongs to sample i.

    Plain functions run in threads, the awaitables of async ones in the running loop. A function that raises, or whose
    result is no finite number, raises `RewardFailed` for the first such sample in order (on_error="stop"; no further
    sample is begun) or leaves None in the sample's place (on_error="drop"). Another `on_error` is a `UserError`.
    """
    if on_error not in ("stop", "drop"):
        raise UserError(f"reward.on_error is {on_error!r}; it must be 'stop' or 'drop'")
    places = asyncio.Semaphore(workers)
    failed = asyncio.Event()

    async def score(sample: RewardSample) -> Score | RewardFailed | None:
        async with places:
            if failed.is_set():
                return None
            try:
                return await _score_one(function, sample, threads)
            except RewardFailed as error:
                if on_error == "stop":
                    failed.set()
                return error

    with ThreadPoolExecutor(workers, thread_name_prefix="reward") as threads:
        results = await asyncio.gather(*(score(sample) for sample in samples))
    failures = [result for result in results if isinstance(result, RewardFailed)]
    if failures and on_error == "stop":
        raise failures[0]
    return [None if isinstance(result, RewardFailed) else result for result in results]


async def _score_one(function: RewardFunction, sample: RewardSample, threads: ThreadPoolExecutor) -> Score:
    def call() -> RewardResult | Awaitable[RewardResult]:
        return function(
            data_source=sample.data_source,
            solution_str=sample.solution,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )

    try:
        result = await asyncio.get_running_loop().run_in_executor(threads, call)
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:
        raise RewardFailed(sample, f"it raised {type(error).__name__}: {error}") from error
    return _as_score(result, sample)


def _as_score(result: object, sample: RewardSample) -> Score:
    if not isinstance(result, Mapping):
        return Score(_as_number("score", result, sample))
    if "score" not in result:
        raise RewardFailed(sample, f"its result has no 'score', only {sorted(map(str, result))}")
    numbers = {str(name): _as_number(str(name), part, sample) for name, part in result.items() if _is_part(name, part)}
    return Score(numbers.pop("score"), numbers)


def _is_part(name: object, part: object) -> bool:
    return name == "score" or isinstance(part, Real)


def _as_number(name: str, value: object, sample: RewardSample) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardFailed(sample, f"its {name!r} must be a finite number, found {value!r}")
    return float(value)
