"""Where a reward function runs: a plain one in a process that can be ended, an async one in an event loop."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from megarl.rewards.event_loop import EventLoop
from megarl.rewards.registry import GIVEN, GIVEN_IF_NAMED, Builtin, Calling
from megarl.rewards.scoring import (
    RewardFailed,
    RewardFunction,
    RewardLost,
    RewardSample,
    RewardTimedOut,
    Score,
    as_score,
)
from megarl.rewards.worker import WorkerKilled, WorkerLost, WorkerPool

MOST_TRIES = 3
"""How many processes a sample may cost."""


class TimeLeft:
    """Time left for one sample, over all its terms; the start of a process is not counted."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens in the context."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds = max(self.seconds - (time.monotonic() - start), 0.0)


class Runner(Protocol):
    """Calls one function."""

    async def __call__(self, sample: RewardSample, time_left: TimeLeft) -> Score:
        """The function's score. Raises `RewardFailed`, and `RewardTimedOut` when no time is left."""
        ...


def arguments_of(calling: Calling, sample: RewardSample) -> dict[str, Any]:
    """Keyword arguments of the call for a sample."""
    values = (sample.data_source, sample.solution, sample.ground_truth, sample.extra_info)
    arguments = dict(zip(GIVEN, values, strict=True))
    if calling.takes_response_tokens:
        arguments[GIVEN_IF_NAMED] = sample.response_tokens
    return arguments


class InProcess:
    """A plain function, which is number `index` of a pool's, in a process that is killed when the time is over."""

    def __init__(self, index: int, calling: Calling, builtin: Builtin | None, pool: WorkerPool) -> None:
        self._index, self._calling, self._builtin, self._pool = index, calling, builtin, pool

    async def __call__(self, sample: RewardSample, time_left: TimeLeft) -> Score:
        """The function's score; a built-in one's may be what its entry says of an end by force.

        A process that was killed is no fault of the sample's, which another then scores, in all the time that there was
        before. Raises RewardLost where that comes again and again.
        """
        seconds = time_left.seconds
        for _ in range(MOST_TRIES):
            time_left.seconds = seconds
            try:
                return await self._try(sample, time_left)
            except WorkerKilled as error:
                killed = error
        raise RewardLost(sample, f"{killed}, {MOST_TRIES} times") from killed

    async def _try(self, sample: RewardSample, time_left: TimeLeft) -> Score:
        builtin = self._builtin
        limit_s = min(time_left.seconds, (builtin and builtin.limit_s) or math.inf)
        try:
            return await self._ask(sample, limit_s, time_left)
        except WorkerKilled:
            raise
        except (TimeoutError, WorkerLost) as error:
            if builtin is not None and builtin.undecided is not None:
                return as_score(builtin.undecided)
            if isinstance(error, WorkerLost):
                raise RewardFailed(sample, str(error)) from error
            raise _timed_out(sample) from error

    async def _ask(self, sample: RewardSample, limit_s: float, time_left: TimeLeft) -> Score:
        request = {"call": self._index, "arguments": arguments_of(self._calling, sample)}
        worker = await self._pool.take()
        try:
            with time_left.running():
                reply = await asyncio.wait_for(self._pool.ask(worker, request), limit_s)
            if reply.get("exhausted"):
                raise WorkerLost(reply["error"])
        except BaseException:
            await self._pool.end(worker)
            raise
        self._pool.give_back(worker)
        if "error" in reply:
            raise RewardFailed(sample, reply["error"])
        return Score(reply["value"], reply["parts"])


class InLoop:
    """An async function, in an event loop of its own: if it blocks that one, its samples still time out."""

    def __init__(self, function: RewardFunction, calling: Calling, loop: EventLoop) -> None:
        self._function, self._calling, self._loop = function, calling, loop

    async def __call__(self, sample: RewardSample, time_left: TimeLeft) -> Score:
        """The function's score."""
        call = asyncio.wrap_future(self._loop.begin(self._call(sample)))
        try:
            # Not asyncio.wait_for: its TimeoutError could be the function's own.
            with time_left.running():
                done, _ = await asyncio.wait([call], timeout=time_left.seconds)
        finally:
            call.cancel()
        if not done:
            raise _timed_out(sample)
        try:
            result = call.result()
        except RewardFailed:
            raise
        except BaseException as error:
            raise RewardFailed(sample, f"it raised {type(error).__name__}: {error}") from error
        try:
            return as_score(result)
        except ValueError as error:
            raise RewardFailed(sample, str(error)) from error

    async def _call(self, sample: RewardSample) -> Any:
        result: Any = self._function(**arguments_of(self._calling, sample))
        try:
            return await result
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop, and with it all other samples
            raise RewardFailed(sample, f"it raised {type(error).__name__}: {error}") from error


def _timed_out(sample: RewardSample) -> RewardTimedOut:
    return RewardTimedOut(sample, "it took longer than reward.timeout_s")
