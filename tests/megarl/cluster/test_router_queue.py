"""The router's queue over scripted engines: who is asked first, for how much, and that everybody is served.

Engines compute, tell, cut, die and come back as a script says; nothing waits, and no process is started.
"""

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.engines import engine_handle, router
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.router import Router
from megarl.cluster.workers.worker import Call, WorkerGone
from megarl.data import Turn
from megarl.data.stretches import here
from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplingParameters

AT_ONCE = 3
ROOM = 4
"""Samples that an engine is asked for at most: the next one is at hand."""
ENGINES = 3


def whole(draw, sample):
    """All tokens of a sample: some are long."""
    return [draw, *range(2 + (5 * draw + 3 * sample) % 7)]


class Process:
    """The process of an engine, which serves the oldest draws first, as many samples as it computes at once."""

    def __init__(self, number):
        self.log = Path(f"engine_{number}.log")
        self.failure = None
        self.asked, self.told = {}, Counter()

    def begin(self, method, *arguments):
        if method == "submit":
            self.asked |= arguments[0]
        return Call(self, None)

    def begin_stream(self, method):
        return f"{method} of {id(self)}"

    def running(self):
        """The numbers of the requests of which it computes samples."""
        numbers = sorted(self.asked, key=lambda number: (self.asked[number].priority, number))
        before = np.cumsum([0, *(len(self.asked[number].samples) for number in numbers)])
        return [number for number, there in zip(numbers, before, strict=False) if there < AT_ONCE]

    def tell(self, number):
        """A new token of each sample that has more than one to come."""
        told = [
            (sample, self._left(number, sample)[0])
            for sample in self.asked[number].samples
            if len(self._left(number, sample)) > 1
        ]
        self.told.update((number, sample) for sample, _ in told)
        samples, tokens = np.array(told, np.int32).reshape(-1, 2).T
        ones = np.ones(len(told), np.int32)
        return Progress(ones * number, samples, ones, tokens, -tokens.astype(np.float32), ones)

    def answer(self, number, *, is_cut):
        """The rest of each sample, or, where it is cut, what was told of."""
        request = self.asked[number]
        turns = []
        for sample in request.samples:
            begun = len(request.begun_of(sample))
            end = begun + self.told[number, sample] if is_cut else None
            tokens = whole(request.priority, sample)[begun:end]
            reason = "abort" if is_cut else "stop"
            turns.append(
                Turn.of(request.prompt_of(sample), tokens, [-each for each in tokens], [1] * len(tokens), reason)
            )
        del self.asked[number]
        return RequestEnded(number, turns)

    def _left(self, number, sample):
        request = self.asked[number]
        begun = list(request.begun_of(sample))
        tokens = whole(request.priority, sample)
        assert tokens[: len(begun)] == begun
        return tokens[len(begun) + self.told[number, sample] :]


class Restarting:
    """Restarts that come to their end when the script says so."""

    def __init__(self):
        self.lock = threading.RLock()
        self.calls, self.under_way = [], set()

    def awaits(self, handle):
        return handle in self.under_way

    def begin(self, handle):
        self.under_way.add(handle)
        handle.renew([Process(9)])

    def go_on(self):
        pass

    def end(self, handle):
        self.under_way.discard(handle)
        handle.note_committed(1)


class Played:
    """A router over engines that serve, and all that was asked of it."""

    def __init__(self):
        self.restarts = Restarting()
        self.handles = [EngineHandle([Process(number)], AT_ONCE) for number in range(ENGINES)]
        for handle in self.handles:
            handle.note_committed(1)
        self.router = Router(self.handles, self.restarts)
        self.router._heartbeat = SimpleNamespace(note_deaths=lambda: None)
        self.asked = []
        self.told = Counter()
        """Tokens that engines told of, by draw and sample."""

    def play(self, what, place, number):
        handle = self.handles[place]
        before = {(each.worker, number) for each in self.handles for number in each.worker.asked}
        getattr(self, what)(handle, number)
        self.check(before)

    def ask(self, _, samples):
        request = Request([5, 9], SamplingParameters(samples=1 + samples % 3), priority=len(self.asked))
        self.asked += self.router.begin([request], self.handles)

    def tell(self, handle, number):
        if handle.state == "serving" and (running := handle.worker.running()):
            told = handle.worker.tell(chosen := running[number % len(running)])
            self.told.update((handle.worker.asked[chosen].priority, sample) for sample in told.samples.tolist())
            self._hear(handle, told)

    def answer(self, handle, number):
        if handle.state == "serving" and (running := handle.worker.running()):
            self._hear(handle, handle.worker.answer(running[number % len(running)], is_cut=False))

    def cut(self, handle, _):
        self._hear(handle, *(handle.worker.answer(number, is_cut=True) for number in list(handle.worker.asked)))

    def die(self, handle, _):
        """One that nobody asked for anything is found by its heartbeat."""
        if not handle.is_up:
            return
        handle.worker.failure = WorkerGone("it was killed", "nothing", handle.worker.log)
        dead = [stream for stream in self.router._streams if stream.worker is handle.worker]
        for stream in dead:
            self.router._lose(stream, handle.worker.failure)
        if not dead:
            self.router._check_engines()

    def come_back(self, handle, _):
        if self.restarts.awaits(handle):
            self.restarts.end(handle)
            self.router._check_engines()

    def update(self, handle, _):
        if handle.state == "serving":
            handle.begin_update(handle.version + 1, [])
            self.router._check_engines()

    def commit(self, handle, _):
        if handle.state == "updating":
            handle.note_committed(handle.version + 1)
            self.router._check_engines()

    def check(self, before):
        """Nobody has too much, nothing that waits is older than what is asked for, and what was told is not lost."""
        there = {(each.worker, number): asked for each in self.handles for number, asked in each.worker.asked.items()}
        waiting = [each.request.priority for each in self.asked if not each.answer.done() and each.handle is None]
        new = [request for where, request in there.items() if where not in before]
        assert not new or not waiting or max(request.priority for request in new) < min(waiting)
        for request in new:
            # Whoever told of them, and died or cut them.
            told = [self.told[request.priority, sample] for sample in request.samples]
            assert [len(request.begun_of(sample)) for sample in request.samples] == told
        serving = [handle for handle in self.handles if handle.state == "serving"]
        able = serving or [handle for handle in self.handles if handle.state == "updating"]
        assert not (waiting and any(handle.load < ROOM for handle in able))
        assert len(there) + len(waiting) == sum(not each.answer.done() for each in self.asked)
        for handle in self.handles:
            sizes = [len(each.samples) for each in handle.worker.asked.values()]
            assert handle.load == sum(sizes)
            # A request goes as a whole: the last one may be more than there is room for.
            assert not sizes or sum(sizes) - max(sizes) < ROOM

    def _hear(self, handle, *events):
        for stream in [each for each in self.router._streams if each.worker is handle.worker]:
            self.router._hear(stream, events)


ACTIONS = st.sampled_from(
    ["ask", "ask", "ask", "tell", "tell", "answer", "cut", "die", "come_back", "update", "commit"]
)


@settings(max_examples=600)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, ENGINES - 1), st.integers(0, 9)), max_size=60))
def test_the_oldest_go_first_in_bounded_numbers_and_all_any_serving_whoever_dies(script) -> None:
    with (
        mock.patch.object(router.threading, "Thread"),
        mock.patch.object(router, "answered", return_value=[]),
        mock.patch.object(router, "say"),
    ):
        played = Played()
        for action in script:
            played.play(*action)
        for place in range(ENGINES):
            played.play("come_back", place, 0)
            played.play("commit", place, 0)
        # The oldest that there is ends next: none starves behind others.
        for _ in range(sum(not each.answer.done() for each in played.asked)):
            left = [each for each in played.asked if not each.answer.done()]
            oldest = min(left, key=lambda each: each.request.priority)
            assert oldest.handle is not None
            place = played.handles.index(oldest.handle)
            assert oldest.handle.worker.running()[0] == oldest.number
            played.play("answer", place, 0)
    for draw, each in enumerate(played.asked):
        found = [here(turn.token_ids).tolist() for turn in each.answer.result(0)]
        assert found == [whole(draw, sample) for sample in range(each.request.sampling.samples)]
        assert all(turn.finish_reason == "stop" for turn in each.answer.result(0))


def test_others_are_asked_while_a_refit_has_to_do_with_restarts() -> None:
    with mock.patch.object(router.threading, "Thread"), mock.patch.object(router, "say"):
        played = Played()
    played.ask(None, 0)
    refitting, is_over = threading.Event(), threading.Event()

    def refit() -> None:
        with played.restarts.lock:
            refitting.set()
            is_over.wait(30)

    holder, looking = threading.Thread(target=refit), threading.Thread(target=played.router._check_engines)
    holder.start()
    assert refitting.wait(30)
    # One dies meanwhile, and is restarted by whoever has the lock, or when it is free.
    dead = played.asked[0].handle
    dead.worker.failure = WorkerGone("it was killed", "nothing", dead.worker.log)
    looking.start()
    looking.join(20)
    was_stuck = looking.is_alive()
    is_over.set()
    holder.join()
    looking.join()
    assert not was_stuck
    assert dead.state == "down"
    played.router._check_engines()
    assert played.restarts.awaits(dead)


def test_an_engine_that_waits_for_weights_does_not_let_all_that_waits_be_looked_through() -> None:
    with mock.patch.object(router.threading, "Thread"), mock.patch.object(router, "say"):
        played = Played()
        played.die(played.handles[0], 0)
        played.handles[0]._state = "starting"
        for _ in range(200):
            played.ask(None, 0)
    assert sum(each.handle is None for each in played.asked) > 150
    with mock.patch.object(played.router, "_able", wraps=played.router._able) as able:
        played.router._send()
    assert able.call_count < 5


def test_news_of_samples_that_go_on_let_no_engine_be_looked_at() -> None:
    with mock.patch.object(router.threading, "Thread"):
        played = Played()
        for _ in range(200):
            played.ask(None, 0)
        with mock.patch.object(played.router, "_able", wraps=played.router._able) as able:
            played.tell(played.handles[0], 0)
            assert able.call_count == 0
            played.answer(played.handles[0], 0)
    assert able.call_count > 0
    assert played.told


def test_an_engine_whose_call_has_ended_is_asked_to_tell_on_and_keeps_its_requests() -> None:
    with mock.patch.object(router.threading, "Thread"), mock.patch.object(router, "say"):
        played = Played()
        played.ask(None, 0)
        (asked,) = played.asked
        handle = asked.handle
        played.tell(handle, 0)
        (stream,) = played.router._streams
        partials = played.router._progress[stream]
        with mock.patch.object(Process, "begin_stream", return_value="a second call") as begun:
            played.router._lose(stream, None)
    assert begun.call_count == 1
    assert [each.references for each in played.router._streams] == ["a second call"]
    assert list(played.router._progress.values()) == [partials]
    assert (asked.handle, handle.load) == (handle, 1)
    assert asked.number in handle.worker.asked
    played.answer(handle, 0)
    assert here(asked.answer.result(0)[0].token_ids).tolist() == whole(0, 0)


def test_nobody_is_asked_for_anything_while_it_is_counted_how_long_engines_were_idle() -> None:
    with mock.patch.object(router.threading, "Thread"):
        played = Played()
        played.ask(None, 0)
    could_ask = []

    def now() -> float:
        asking = threading.Thread(target=lambda: could_ask.append(played.router._lock.acquire(blocking=False)))
        asking.start()
        asking.join()
        return 0.0

    with mock.patch.object(engine_handle, "time", SimpleNamespace(monotonic=now)):
        idle_s = played.router.take_idle_s()
    assert len(idle_s) == ENGINES
    assert could_ask == [False] * ENGINES
