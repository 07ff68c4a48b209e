"""Execution of reward functions: plain functions in processes that can be killed, async ones in an event loop."""

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from megarl.rewards.event_loop import EventLoop
from megarl.rewards.registry import GIVEN, GIVEN_IF_NAMED, Builtin, Calling
from megarl.rewards.scoring import (
    RewardFailed,
    RewardFunction,
    RewardLost,
    RewardTimedOut,
    Score,
    as_score,
)
from megarl.rewards.worker import MOST_TRIES, WorkerKilledError, WorkerLostError, WorkerPool


class TimeLeft:
    """Time left for one sample, over all of its terms; starting a process does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent in the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds = max(self.seconds - (time.monotonic() - start), 0.0)


class Runner(Protocol):
    """Calls one reward function."""

    @property
    def places(self) -> asyncio.Semaphore:
        """Semaphore to acquire before a call."""
        ...

    async def __call__(self, arguments: Mapping[str, Any], time_left: TimeLeft) -> Score:
        """Score a sample. Raises `RewardFailed`, and `RewardTimedOut` when no time is left."""
        ...


def taken(arguments: Mapping[str, Any], calling: Calling) -> dict[str, Any]:
    """Select the `arguments` that the function takes."""
    names = (*GIVEN, GIVEN_IF_NAMED) if calling.takes_response_tokens else GIVEN
    return {name: arguments[name] for name in names}


class InProcess:
    """Runs a plain function, number `index` of the pool, in a process that is killed when the time is over."""

    def __init__(
        self, index: int, calling: Calling, builtin: Builtin | None, pool: WorkerPool, places: asyncio.Semaphore
    ) -> None:
        self._index, self._calling, self._builtin, self._pool = index, calling, builtin, pool
        self.places = places

    async def __call__(self, arguments: Mapping[str, Any], time_left: TimeLeft) -> Score:
        """Score a sample; a built-in function that crashes or exceeds its own limit may return its undecided result.

        If the process is killed from outside, another one scores the sample, with the full time limit again. Raises
        RewardLost after MOST_TRIES such kills, and as `Runner`.
        """
        seconds = time_left.seconds
        for _ in range(MOST_TRIES):
            time_left.seconds = seconds
            try:
                return await self._try(arguments, time_left)
            except WorkerKilledError as error:
                killed = error
        raise RewardLost(arguments, f"{killed}, {MOST_TRIES} times") from killed

    async def _try(self, arguments: Mapping[str, Any], time_left: TimeLeft) -> Score:
        builtin = self._builtin
        own_limit_s = (builtin and builtin.limit_s) or math.inf
        is_own = own_limit_s < time_left.seconds
        undecided = builtin.undecided if builtin is not None and builtin.may_be_undecided else None
        try:
            return await self._ask(arguments, min(time_left.seconds, own_limit_s), time_left)
        except WorkerKilledError:
            raise
        except TimeoutError as error:
            if is_own and undecided is not None:
                return as_score(undecided)
            raise _timed_out(arguments) from error
        except WorkerLostError as error:
            if undecided is not None:
                return as_score(undecided)
            raise RewardFailed(arguments, str(error)) from error

    async def _ask(self, arguments: Mapping[str, Any], limit_s: float, time_left: TimeLeft) -> Score:
        request = {"call": self._index, "arguments": taken(arguments, self._calling)}
        worker = await self._pool.take()
        try:
            with time_left.running():
                reply = await asyncio.wait_for(self._pool.ask(worker, request), limit_s)
            if reply.get("exhausted"):
                raise WorkerLostError(reply["error"])
        except BaseException:
            await self._pool.end(worker)
            raise
        self._pool.give_back(worker)
        if "error" in reply:
            raise RewardFailed(arguments, reply["error"])
        return Score(reply["value"], reply["parts"])


class _Call:
    """A coroutine that runs in one event loop while another one, in which this object is made, waits for `ended`.

    `ended` resolves to the coroutine's task once that has ended, or to None if the time is over before. `begin` and
    `cancel` must be called in the loop that runs the coroutine. `asyncio.wait_for` could not tell its TimeoutError from
    one of the function; `asyncio.wait` and `asyncio.wrap_future` take longer than a short function.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], asking: EventLoop) -> None:
        self._coroutine, self._asking = coroutine, asking
        self.ended: asyncio.Future[asyncio.Task[Any] | None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[Any]

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self._asking.soon(self._end))

    def cancel(self) -> None:
        self._task.cancel()

    def give_up(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(self._task)
        elif not self._task.cancelled():
            self._task.exception()  # retrieved, so that asyncio does not log it: nobody waits for it any more


class InLoop:
    """Runs an async function in a separate event loop; its samples time out even if it blocks that loop."""

    def __init__(
        self,
        function: RewardFunction,
        calling: Calling,
        loop: EventLoop,
        asking: EventLoop,
        places: asyncio.Semaphore,
    ) -> None:
        """`loop` runs the function; `asking` is the loop that samples are scored from."""
        self._function, self._calling, self._loop, self._asking = function, calling, loop, asking
        self.places = places

    async def __call__(self, arguments: Mapping[str, Any], time_left: TimeLeft) -> Score:
        """Score a sample. Raises as `Runner`."""
        task = await self._ended(_Call(self._call(arguments), self._asking), time_left)
        if task is None:
            raise _timed_out(arguments)
        try:
            result = task.result()
        except RewardFailed:
            raise
        except BaseException as error:
            raise RewardFailed(arguments, f"it raised {type(error).__name__}: {error}") from error
        try:
            return as_score(result)
        except ValueError as error:
            raise RewardFailed(arguments, str(error)) from error

    async def _ended(self, call: _Call, time_left: TimeLeft) -> asyncio.Task[Any] | None:
        """Run a call and return its task; None if it does not end in time.

        Cancels the call then, and if the caller is cancelled.
        """
        task = None
        self._loop.soon(call.begin)
        timer = asyncio.get_running_loop().call_later(time_left.seconds, call.give_up)
        try:
            with time_left.running():
                task = await call.ended
        finally:
            timer.cancel()
            if task is None:
                self._loop.soon(call.cancel)
        return task

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        result: Any = self._function(**taken(arguments, self._calling))
        try:
            return await result
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop, and all other samples with it
            raise RewardFailed(arguments, f"it raised {type(error).__name__}: {error}") from error


def _timed_out(arguments: Mapping[str, Any]) -> RewardTimedOut:
    return RewardTimedOut(arguments, "it took longer than reward.timeout_s")
