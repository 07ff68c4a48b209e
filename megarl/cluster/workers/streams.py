"""Calls of workers that give results one by one, several waited for at once: the first to come is the first given."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import ray

from megarl.cluster.workers.calls import HEARTBEAT_INTERVAL_S, answer_of, end_silent
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.long_arrays import put_back
from megarl.cluster.workers.worker import Call, Failed, Worker


@dataclass(frozen=True)
class Stream:
    """A call that was begun in a worker and gives its results one by one; `results_of` waits for them."""

    worker: Worker
    references: ray.ObjectRefGenerator
    begun: list[Any] = field(default_factory=list, compare=False)
    """A result whose arrays are to come, as the worker gave it, and references to those that have."""

    @classmethod
    def begin(cls, worker: Worker, method: str, *arguments: Any) -> "Stream":
        """Begin a call of a method of the worker's object."""
        return cls(worker, worker.begin_stream(method, *arguments))


_AT_ONCE = 64
"""Results of a stream that are taken before others are looked at."""

Waited = TypeVar("Waited", bound=Stream | Call[Any])


TO_COME: Final = object()
"""In place of a result of which parts are still to come: its process may have been stopped in between."""


class End(NamedTuple):
    """A stream came to its end, or failed."""

    failure: Exception | None = None


def results_of(streams: Collection[Stream]) -> Iterator[tuple[Stream, Any]]:
    """Yield the results of all streams, as they come, each with its stream. Raises as `wait`.

    Long arrays of a result are `StoredArray`: they stay with the worker until somebody opens them.
    """
    left, heartbeats = list(streams), Heartbeats[Worker, Call[Any]](HEARTBEAT_INTERVAL_S)
    while left:
        if not (ready := _ready(left, 1, HEARTBEAT_INTERVAL_S)):
            end_silent([stream.worker for stream in left], heartbeats)
        for stream in ready:
            result = next_part(stream)
            if result is TO_COME:
                continue
            if not isinstance(result, End):
                yield stream, result
            elif result.failure is None:
                left.remove(stream)
            else:
                raise result.failure


def next_of(streams: Collection[Stream], calls: Collection[Call[Any]], timeout_s: float) -> list[tuple[Stream, Any]]:
    """Results that streams have to give, as `results_of` gives it, or their `End`: of each at most `_AT_ONCE` results.

    Nothing if the time is over before there is something, or one of the `calls` has ended before.
    """
    waited_for: list[Stream | Call[Any]] = [*streams, *calls]
    ready = _ready(waited_for, len(waited_for), 0.0) or _ready(waited_for, 1, timeout_s)
    return [(each, result) for each in ready if isinstance(each, Stream) for result in islice(_there(each), _AT_ONCE)]


def _there(stream: Stream) -> Iterator[Any]:
    """The results of a stream that has one, as many as are there, or to its `End`."""
    is_there = True
    while is_there:
        result = next_part(stream)
        if result is not TO_COME:
            yield result
        is_there = not isinstance(result, End) and stream.references.next_ready()


def _ready(waited_for: Collection[Waited], count: int, timeout_s: float) -> list[Waited]:
    """As many as `count` of them that have a result, or have ended."""
    by_references: dict[Any, Waited] = {
        each.references if isinstance(each, Stream) else each.reference: each for each in waited_for
    }
    # Where a long array may come next, it is enough that it exists: it stays where it is. All else is read at once, and
    # comes from all machines side by side.
    awaits_arrays = any(isinstance(each, Stream) and each.begun for each in waited_for)
    done, _ = ray.wait(list(by_references), num_returns=count, timeout=timeout_s, fetch_local=not awaits_arrays)
    return [by_references[each] for each in done]


def next_part(stream: Stream) -> Any:
    """Take what a stream has next: a result or the last part of one, `TO_COME` for another part, or the `End`."""
    begun, reference = stream.begun, next(stream.references, None)
    if reference is None:
        # A failure comes as the last thing of a stream, in place of any array or of the None behind them.
        return _end_with(stream, begun[-1]) if len(begun) > 1 else End()
    if not begun:
        answer = answer_of(Call[Any](stream.worker, reference))
        if isinstance(answer, Failed):
            return End(answer.failure)
        rest, count = answer
        if count:
            begun.append(answer)
            return TO_COME
        return put_back(rest, [])
    begun.append(reference)
    (rest, count), *references = begun
    if len(references) <= count:
        return TO_COME
    begun.clear()
    end = _end_with(stream, references.pop())
    return put_back(rest, references) if end.failure is None else end


def _end_with(stream: Stream, last: ray.ObjectRef) -> End:
    """How a stream ends if this is the last that it gave: with a failure, if it is one."""
    answer = answer_of(Call[Any](stream.worker, last))
    return End(answer.failure if isinstance(answer, Failed) else None)
