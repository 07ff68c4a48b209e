"""Calls that the controller begins in engines: what becomes of one that fails, and what each of them costs."""

import time

import pytest
import ray
from echo_engine import SLOW, ask

from megarl.cluster.engines import router
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Worker, WorkerFailed

pytestmark = pytest.mark.usefixtures("shared_cluster", "script")


class Unreadable:
    """It comes into a process by a division by zero."""

    def __reduce__(self):
        return divmod, (1, 0)


def test_calls_that_fail_are_heard_of_wait_for_their_turn_and_share_what_is_large(open_group, script, monkeypatch):
    """In one test, because processes take seconds to start."""
    with open_group(2, restarts=1) as (engines, refit):
        check_that_names_are_put_once(refit, monkeypatch)
        check_that_requests_fail_that_an_engine_cannot_read(engines)
        check_that_requests_fail_of_an_engine_that_could_not_end_others(engines, script)
        check_that_nobody_spins_while_restarts_are_held(engines, monkeypatch)


def check_that_names_are_put_once(refit, monkeypatch):
    begun, begin = [], Worker.begin

    def noting(self, method, *arguments):
        begun.append((method, *arguments))
        return begin(self, method, *arguments)

    monkeypatch.setattr(Worker, "begin", noting)
    refit(0)
    (first, second) = [names for method, *_, names in begun if method == "begin_update"]
    assert isinstance(first, ray.ObjectRef)
    assert first == second


def check_that_requests_fail_that_an_engine_cannot_read(engines):
    unreadable = ask(1)
    unreadable.text = Unreadable()
    with pytest.raises(WorkerFailed, match="division"):
        engines.generate([unreadable])
    assert [turn.token_ids[:-1] for (turn,) in engines.generate([ask(2), ask(3)])] == [[2, 102, 0], [3, 103, 0]]
    assert [(handle.state, handle.load) for handle in engines.handles] == [("serving", 0)] * 2


def check_that_requests_fail_of_an_engine_that_could_not_end_others(engines, script):
    script("abort")
    one = engines.excluding([engines.handles[1].worker])
    abandoned, waiting = one.begin_generate([ask(SLOW), ask(SLOW)])
    engines._queue.abandon([abandoned])
    with pytest.raises(WorkerFailed, match="the echo goes on"):
        waiting.answer.result(60)
    assert [turn.token_ids[:-1] for (turn,) in engines.generate([ask(2), ask(3)])] == [[2, 102, 0], [3, 103, 0]]
    assert [(handle.state, handle.load) for handle in engines.handles] == [("serving", 0)] * 2


def check_that_nobody_spins_while_restarts_are_held(engines, monkeypatch):
    ended = engines.handles[0].worker.begin_node()
    wait([ended])
    monkeypatch.setattr(type(engines._restarts), "calls", [ended])
    rounds, next_of = [], router.next_of
    monkeypatch.setattr(router, "next_of", lambda *given: rounds.append(given) or next_of(*given))
    with engines.undisturbed():
        time.sleep(2)
    assert len(rounds) < 50
