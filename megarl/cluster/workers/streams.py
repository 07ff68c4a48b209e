"""Streaming calls of workers: waits for several at once, and yields results in arrival order."""

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
    """A call in flight that yields results one by one; `results_of` waits for them."""

    worker: Worker
    references: ray.ObjectRefGenerator
    begun: list[Any] = field(default_factory=list, compare=False)
    """A result as the worker sent it, whose long arrays are still arriving, and references to those that have arrived.
    """

    @classmethod
    def begin(cls, worker: Worker, method: str, *arguments: Any) -> "Stream":
        """Begin a call of a method of the worker's object."""
        return cls(worker, worker.begin_stream(method, *arguments))


_AT_ONCE = 64
"""Results taken from a stream before other streams get their turn."""

Waited = TypeVar("Waited", bound=Stream | Call[Any])


TO_COME: Final = object()
"""Stands for a result with missing parts: its process may have been suspended in between."""


class End(NamedTuple):
    """The end of a stream, or its failure."""

    failure: Exception | None = None


def results_of(streams: Collection[Stream]) -> Iterator[tuple[Stream, Any]]:
    """Yield the results of all streams in arrival order, each with its stream. Raises as `wait`.

    Long arrays of a result are `StoredArray`: they stay with the worker until they are opened.
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
    """Return available results as `results_of` yields them, or a stream's `End`: at most `_AT_ONCE` per stream.

    Empty if nothing is available within `timeout_s`, or if one of the `calls` ends first.
    """
    waited_for: list[Stream | Call[Any]] = [*streams, *calls]
    ready = _ready(waited_for, len(waited_for), 0.0) or _ready(waited_for, 1, timeout_s)
    return [(each, result) for each in ready if isinstance(each, Stream) for result in islice(_there(each), _AT_ONCE)]


def _there(stream: Stream) -> Iterator[Any]:
    """Yield the available results of a stream that has one, up to its `End`."""
    is_there = True
    while is_there:
        result = next_part(stream)
        if result is not TO_COME:
            yield result
        is_there = not isinstance(result, End) and stream.references.next_ready()


def _ready(waited_for: Collection[Waited], count: int, timeout_s: float) -> list[Waited]:
    """Return up to `count` of them that have a result or have ended."""
    by_references: dict[Any, Waited] = {
        each.references if isinstance(each, Stream) else each.reference: each for each in waited_for
    }
    # A long array, which may come next, only needs to exist, as it stays where it is. Everything else is read at once,
    # so it is fetched from all machines in parallel.
    awaits_arrays = any(isinstance(each, Stream) and each.begun for each in waited_for)
    done, _ = ray.wait(list(by_references), num_returns=count, timeout=timeout_s, fetch_local=not awaits_arrays)
    return [by_references[each] for each in done]


def next_part(stream: Stream) -> Any:
    """Take the next part of a stream: a result or its last part, `TO_COME` for another part, or the `End`."""
    begun, reference = stream.begun, next(stream.references, None)
    if reference is None:
        # A failure is the last item of a stream, in place of an array or of the None after the arrays.
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
    """The end of a stream whose last item is `last`: a failure, if that is one."""
    answer = answer_of(Call[Any](stream.worker, last))
    return End(answer.failure if isinstance(answer, Failed) else None)
