"""Calls of workers that give their results one by one: whichever comes first, of any number of them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import ray

from megarl.cluster.workers.calls import LOOK_S, answer_of, end_silent
from megarl.cluster.workers.long_arrays import put_back
from megarl.cluster.workers.signs_of_life import SignsOfLife
from megarl.cluster.workers.worker import Call, Failed, Worker


@dataclass(frozen=True)
class Stream:
    """A call that was begun in a worker and gives its results one by one; `results_of` waits for them."""

    worker: Worker
    references: ray.ObjectRefGenerator

    @classmethod
    def begin(cls, worker: Worker, method: str, *arguments: Any) -> "Stream":
        """Begin a call of a method of the worker's object."""
        return cls(worker, worker.begin_stream(method, *arguments))


_AT_ONCE = 64
"""Results of a stream that are taken before others are looked at."""

Waited = TypeVar("Waited", bound=Stream | Call[Any])


class End(NamedTuple):
    """A stream came to its end, or failed."""

    failure: Exception | None = None


def results_of(streams: Collection[Stream]) -> Iterator[tuple[Stream, Any]]:
    """Yield the results of all streams, as they come, each with its stream. Raises as `wait`.

    Long arrays of a result are `Stored`: they stay with the worker until somebody opens them.
    """
    left, signs = list(streams), SignsOfLife[Worker, Call[Any]](LOOK_S)
    while left:
        if not (ready := _ready(left, 1, LOOK_S)):
            end_silent([stream.worker for stream in left], signs)
        for stream in ready:
            result = _next(stream)
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
        yield (result := _next(stream))
        is_there = not isinstance(result, End) and stream.references.next_ready()


def _ready(waited_for: Collection[Waited], count: int, timeout_s: float) -> list[Waited]:
    """As many as `count` of them that have a result, or have ended."""
    by_references: dict[Any, Waited] = {
        each.references if isinstance(each, Stream) else each.reference: each for each in waited_for
    }
    done, _ = ray.wait(list(by_references), num_returns=count, timeout=timeout_s)
    return [by_references[each] for each in done]


def _next(stream: Stream) -> Any:
    """The next result of a stream, or its `End`."""
    result = next(stream.references, None)
    if result is None:
        return End()
    answer = answer_of(Call[Any](stream.worker, result))
    if isinstance(answer, Failed):
        return End(answer.failure)
    rest, arrays = answer
    references = arrays_behind(stream, arrays) if arrays else []
    return End(references.failure) if isinstance(references, Failed) else put_back(rest, references)


def arrays_behind(stream: Stream, count: int) -> list[ray.ObjectRef] | Failed:
    """References to the arrays of the result that came last."""
    # A failure comes as the last thing of a stream, in place of any of them or of the None behind them.
    *arrays, last = islice(stream.references, count + 1)
    answer = answer_of(Call[Any](stream.worker, last))
    return answer if isinstance(answer, Failed) else arrays
