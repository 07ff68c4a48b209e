"""Calls of workers that give their results one by one: whichever comes first, of any number of them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import ray

from megarl.cluster.long_arrays import put_back
from megarl.cluster.worker_group import Call, Failed, Worker, answer_of


@dataclass(frozen=True)
class Stream:
    """A call that was begun in a worker and gives its results one by one; `results_of` waits for them."""

    worker: Worker
    references: ray.ObjectRefGenerator

    @classmethod
    def begin(cls, worker: Worker, method: str, *arguments: Any) -> "Stream":
        """Begin a call of a method of the worker's object."""
        return cls(worker, worker.begin_stream(method, *arguments))


class End(NamedTuple):
    """A stream came to its end, or failed."""

    failure: Exception | None = None


def results_of(streams: Collection[Stream]) -> Iterator[tuple[Stream, Any]]:
    """Yield the results of all streams, as they come, each with its stream. Raises as `wait`.

    Long arrays of a result are `Stored`: they stay with the worker until somebody opens them.
    """
    left = list(streams)
    while left:
        found = next_of(left)
        assert found is not None
        stream, result = found
        if not isinstance(result, End):
            yield stream, result
        elif result.failure is None:
            left.remove(stream)
        else:
            raise result.failure


def next_of(
    streams: Collection[Stream], calls: Collection[Call[Any]] = (), timeout_s: float | None = None
) -> tuple[Stream, Any] | None:
    """The next result of any stream, as `results_of` gives it, or its `End`.

    None if one of the `calls` has ended before, or the time is over.
    """
    by_references = {stream.references: stream for stream in streams}
    waiting: list[Any] = [*by_references, *(call.reference for call in calls)]
    done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
    if not done or done[0] not in by_references:
        return None
    stream = by_references[done[0]]
    result = next(stream.references, None)
    if result is None:
        return stream, End()
    answer = answer_of(Call[Any](stream.worker, result))
    if isinstance(answer, Failed):
        return stream, End(answer.failure)
    rest, arrays = answer
    references = arrays_behind(stream, arrays) if arrays else []
    if isinstance(references, Failed):
        return stream, End(references.failure)
    return stream, put_back(rest, references)


def arrays_behind(stream: Stream, count: int) -> list[ray.ObjectRef] | Failed:
    """References to the arrays of the result that came last."""
    # A failure comes as the last thing of a stream, in the place of any of them or of the None behind them.
    *arrays, last = islice(stream.references, count + 1)
    answer = answer_of(Call[Any](stream.worker, last))
    return answer if isinstance(answer, Failed) else arrays
