"""Waits for calls of workers: returns all results in order, and raises the first failure at once, with its cause."""

import re
import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from math import inf
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from converters.errors import UserError
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import GOES_ON, Call, Failed, Worker, WorkerFailed, WorkerGone
from megarl.process.errors import RunFailed

R = TypeVar("R", covariant=True)

# How long other workers may take to report that they failed, too.
_CONSEQUENCES_S = 5.0
LONGEST_S = 24 * 3600.0
"""Longer than any call: even one that writes files may take at most half of it."""
_IN_VAIN = re.compile(r"Timed out waiting \d+ms for|[Ww]ait timeout after \d+ms")
"""Matches the error of a collective, or its store, that timed out waiting for a peer."""
HEARTBEAT_INTERVAL_S = 5.0
"""How often awaited workers, of which there may be thousands, are asked for a heartbeat."""


def wait(
    calls: Sequence[Call[R]], timeout_s: float = LONGEST_S, key: str = "", *, since_s: float | None = None
) -> list[R]:
    """Results of all `calls`, in order; raises as soon as one of them fails.

    The others may be waiting for the failed one in a collective, so waiting for them first could hang. Raises a
    UserError or RunFailed that was raised in the worker. Raises WorkerGone if a process died, was silent for too long
    or did not answer within `timeout_s`, whose configuration key is `key`. Otherwise raises WorkerFailed with the
    reason and the end of the log. The time counts from now, or from `since_s`.
    """
    deadline = (time.monotonic() if since_s is None else since_s) + timeout_s
    pending, results = list(calls), dict[ray.ObjectRef, R]()
    heartbeats = Heartbeats[Worker, Call[Any]](HEARTBEAT_INTERVAL_S)
    while pending:
        left = max(0.0, deadline - time.monotonic())
        all_done = _done(pending, min(left, HEARTBEAT_INTERVAL_S))
        if not all_done:
            if left > HEARTBEAT_INTERVAL_S:
                end_silent([call.worker for call in pending], heartbeats)
                continue
            raise _unanswering(pending[0].worker, timeout_s, key)
        for done in all_done:
            pending.remove(done)
            answer = answer_of(done)
            if isinstance(answer, Failed):
                raise _cause(answer.failure, pending)
            results[done.reference] = answer
    return [results[call.reference] for call in calls]


def wait_together(
    calls: Sequence[Call[Any]],
    consequence: type[Exception],
    at_first: Callable[[Exception], None] = lambda _failure: None,
    *,
    last: Collection[Call[Any]] = (),
    timeout_s: float = LONGEST_S,
    key: str = "",
) -> None:
    """Wait for calls of workers of any groups that depend on each other.

    When one fails, the others soon fail with a `consequence`; `at_first` is called with the first failure, to notify
    workers that would not notice. Raises, as `wait` does, the most informative failure: preferably the death of a
    process, then any error that is not a consequence. Once only calls of `last` remain, which depend on nobody, they
    have `timeout_s` left.
    """
    pending, heartbeats = list(calls), Heartbeats[Worker, Call[Any]](HEARTBEAT_INTERVAL_S)
    failures: list[Exception] = []
    need_others = {call.reference for call in calls} - {call.reference for call in last}
    deadline = inf
    while pending:
        if deadline == inf and not need_others:
            deadline = time.monotonic() + timeout_s
        left = max(0.0, deadline - time.monotonic())
        done = _first_done(pending, _CONSEQUENCES_S if failures else min(left, HEARTBEAT_INTERVAL_S))
        if done is None:
            if failures:
                break
            if left <= HEARTBEAT_INTERVAL_S:
                raise _unanswering(pending[0].worker, timeout_s, key)
            end_silent([call.worker for call in pending], heartbeats)
            continue
        pending.remove(done)
        need_others.discard(done.reference)
        if isinstance(answer := answer_of(done), Failed):
            if not failures:
                at_first(answer.failure)
            failures.append(answer.failure)
    if failures:
        raise min(failures, key=lambda failure: _depth(failure, consequence))


def end_silent(workers: Collection[Worker], heartbeats: Heartbeats[Worker, Call[Any]]) -> None:
    """Check the heartbeats of awaited workers, and of workers that they need.

    Kills workers that were silent for too long, and workers that need a dead one, so that their calls end.
    """
    needed = {each for worker in workers for each in worker.needs}
    looked = heartbeats.look({each: each.begin_node for each in {*workers, *needed}})
    for worker in looked.silent:
        worker.end_silent()
    for call in looked.ended:
        if call.worker in needed:
            answer_of(call)  # notes a death
    for worker in workers:
        gone = next((each.failure for each in worker.needs if isinstance(each.failure, WorkerGone)), None)
        if gone is not None and not isinstance(worker.failure, WorkerGone):
            worker.end_without(gone)


def unfinished(calls: Sequence[Call[R]], timeout_s: float = 0.0) -> list[Call[R]]:
    """The calls that have not ended after `timeout_s`."""
    references = [call.reference for call in calls]
    left = set(ray.wait(references, num_returns=len(references), timeout=timeout_s)[1])
    return [call for call in calls if call.reference in left]


def _unanswering(worker: Worker, timeout_s: float, key: str) -> WorkerGone:
    """The failure of a worker that did not answer in time."""
    silent = f"{worker.log.stem} gave no answer for {timeout_s:g} s"
    advice = f", and raise {key} if it was only slow" if key else ""
    worker.failure = WorkerGone(silent, f"see the end of its log{advice}", worker.log)
    return worker.failure


def ended_calls(calls: Sequence[Call[R]]) -> "list[tuple[Call[R], R | Failed]]":
    """The calls that have ended, each with its result or failure."""
    if not calls:
        return []
    left = {call.reference for call in unfinished(calls)}
    return [(call, answer_of(call)) for call in calls if call.reference not in left]


def _first_done(calls: Sequence[Call[R]], timeout_s: float) -> Call[R] | None:
    """The first call that has ended; None if none ends within `timeout_s`."""
    return next(iter(_done(calls, timeout_s)), None)


def _done(calls: Sequence[Call[R]], timeout_s: float) -> list[Call[R]]:
    """Wait for the first call to end; return all that have ended by then, none after `timeout_s`."""
    references = [call.reference for call in calls]
    if not ray.wait(references, num_returns=1, timeout=timeout_s)[0]:
        return []
    done = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
    return [call for call in calls if call.reference in done]


class _Depth(IntEnum):
    """How far a call's failure is from the root cause."""

    END_OF_PROCESS = 0
    ERROR = 1
    CONSEQUENCE = 2


def _depth(failure: Exception, consequence: type[Exception] | tuple[()]) -> _Depth:
    error = failure.error if isinstance(failure, WorkerFailed) else failure
    if error is None:
        return _Depth.END_OF_PROCESS
    return _Depth.CONSEQUENCE if isinstance(error, consequence) else _Depth.ERROR


def _cause(failure: Exception, pending: Sequence[Call[Any]]) -> Exception:
    """Find the root cause of a failure.

    It may be the death of another worker, which is noticed soon afterwards, or a hung one, for which the others waited
    in a collective until it timed out.
    """
    if _depth(failure, ()) is not _Depth.ERROR:
        return failure
    deadline = time.monotonic() + _CONSEQUENCES_S
    left = list(pending)
    while left and (seconds := deadline - time.monotonic()) > 0:
        done = _first_done(left, seconds)
        if done is None:
            break
        left.remove(done)
        other = answer_of(done)
        if isinstance(other, Failed) and isinstance(other.failure, WorkerGone):
            return other.failure
    if left and isinstance(failure, WorkerFailed) and _IN_VAIN.search(failure.reason):
        return _missing([call.worker for call in left], failure)
    return failure


def _missing(workers: Sequence[Worker], failure: WorkerFailed) -> WorkerGone:
    """The failure of workers that did not join a collective, in which another one failed."""
    names = [worker.log.stem for worker in workers]
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    first = workers[0]
    first.failure = WorkerGone(
        f"{who} did not come to a collective in which {failure.log.stem} waited ({failure.reason})",
        "the end of its log may say where it stands, and cluster.collective_timeout_s is to be raised if it was only "
        f"slow; {GOES_ON}",
        first.log,
    )
    return first.failure


def answer_of(done: Call[R]) -> "R | Failed":
    """The result of a call that has ended, or why it failed. Ray copies the result at each call of this function."""
    log = done.worker.log
    try:
        return ray.get(done.reference)
    except RayTaskError as error:
        if isinstance(error.cause, UserError | RunFailed):
            return Failed(error.cause)
        failure = WorkerFailed(f"{type(error.cause).__name__}: {error.cause}", log, error.cause)
        if not isinstance(done.worker.failure, WorkerGone):  # after its death no later failure counts
            done.worker.failure = failure
        return Failed(failure)
    except ObjectLostError:
        happened = f"a result of {log.stem} is gone with the machine that had it"
        done.worker.failure = WorkerGone(happened, f"see to the machine; {GOES_ON}", log)
    except OutOfMemoryError:
        happened = f"Ray ended {log.stem}, because the memory of its machine was nearly full"
        advice = (
            "leave the machine to the run, or make it smaller (loop.max_tokens_per_micro_batch, fewer ranks or engines)"
        )
        done.worker.failure = WorkerGone(happened, f"{advice}; {GOES_ON}", log)
    except (ActorPlacementGroupRemoved, ActorUnschedulableError, RuntimeEnvSetupError) as error:
        # Not a RayActorError, because the process never existed.
        reason = str(error).splitlines()[0].removesuffix(".")
        happened = f"Ray could not make the process of {log.stem} ({reason})"
        done.worker.failure = failure = WorkerGone(happened, f"see to its machine, and Ray's logs; {GOES_ON}", log)
        failure.details = f"{error}\n{failure.details}"
    except RayActorError as error:
        happened = f"the process of {log.stem} died"
        if "node has died" in str(error):
            happened, advice = f"{log.stem} is gone with the Ray node that it was on", "see to the machine"
        else:
            advice = "where its log says nothing, the kernel may have ended it for want of memory (dmesg tells)"
        if not isinstance(done.worker.failure, WorkerGone):  # otherwise it was killed for that failure
            done.worker.failure = WorkerGone(happened, f"{advice}; {GOES_ON}", log)
    return Failed(done.worker.failure)
