"""The queue of requests over scripted engines: who is asked first, for how much, and that everybody is served.

Engines compute, tell, cut, die and come back as a script says; nothing waits, and no process is started.
"""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.request_queue import RequestQueue
from megarl.cluster.engines.router import Router
from megarl.cluster.workers.worker import Call, WorkerGone
from megarl.data import Turn
from megarl.data.stretches import fetch
from megarl.rollout.protocol import Progress, Request, RequestEnded, SamplesEnded, SamplingParameters

AT_ONCE = 3
ROOM = 4
"""Samples that an engine is asked for at most: the next one is at hand."""
ENGINES = 3


def whole(draw, sample):
    """All tokens of a sample: some are long."""
    return [draw, *range(2 + (5 * draw + 3 * sample) % 7)]


class Process:
    """The process of an engine, which serves the oldest draws first, as many samples as it computes at once."""

    silence_s = 60.0

    def __init__(self, number):
        self.log = Path(f"engine_{number}.log")
        self.failure = None
        self.asked, self.told = {}, Counter()
        self.ended = set()
        """Samples that have ended before the last of their request, by its number and theirs."""
        self.streams = 0

    def begin(self, method, *arguments):
        if method == "submit":
            self.asked |= arguments[0]
        return Call(self, None)

    def begin_stream(self, method, engines):
        assert engines == ENGINES
        self.streams += 1
        return f"{method} of {id(self)}, call {self.streams}"

    def running(self):
        """The numbers of the requests of which it computes samples."""
        numbers = sorted(self.asked, key=lambda number: (self.asked[number].priority, number))
        before = np.cumsum([0, *(len(self.left(number)) for number in numbers)])
        return [number for number, there in zip(numbers, before, strict=False) if there < AT_ONCE]

    def left(self, number):
        """The samples of a request that go on."""
        return [sample for sample in self.asked[number].samples if (number, sample) not in self.ended]

    def end_sample(self, number):
        """The end of its first sample that goes on."""
        self.ended.add((number, self.left(number)[0]))
        return SamplesEnded([number])

    def tell(self, number):
        """A new token of each sample that has more than one to come."""
        told = [
            (sample, self._left(number, sample)[0])
            for sample in self.left(number)
            if len(self._left(number, sample)) > 1
        ]
        self.told.update((number, sample) for sample, _ in told)
        samples, tokens = np.array(told, np.int32).reshape(-1, 2).T
        ones = np.ones(len(told), np.int32)
        return Progress(ones * number, samples, ones, tokens, -tokens.astype(np.float32), ones)

    def answer(self, number, *, is_cut):
        """The rest of each sample, or, where it is cut before its end, what was told of."""
        request = self.asked[number]
        turns = []
        for sample in request.samples:
            begun = len(request.begun_of(sample))
            was_cut = is_cut and (number, sample) not in self.ended
            end = begun + self.told[number, sample] if was_cut else None
            tokens = whole(request.priority, sample)[begun:end]
            reason = "abort" if was_cut else "stop"
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


class Played:
    """A queue over engines that serve, and all that was asked of it. Restarts end when the script says so."""

    def __init__(self, handle_class=EngineHandle, starting=()):
        self.handles = [handle_class([Process(number)], AT_ONCE) for number in range(ENGINES)]
        for number, handle in enumerate(self.handles):
            if number not in starting:
                handle.note_committed(1)
        self.restarting = set()
        self.queue = RequestQueue(self.handles, self.restarting.__contains__)
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
        self.asked += self.queue.begin([request], self.handles)

    def tell(self, handle, number):
        if handle.state == "serving" and (running := handle.worker.running()):
            told = handle.worker.tell(chosen := running[number % len(running)])
            self.told.update((handle.worker.asked[chosen].priority, sample) for sample in told.samples.tolist())
            self._hear(handle, told)

    def end_sample(self, handle, number):
        if handle.state == "serving" and (running := handle.worker.running()):
            number = running[number % len(running)]
            if len(handle.worker.left(number)) > 1:
                self._hear(handle, handle.worker.end_sample(number))

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
        for stream in self._streams_of(handle):
            assert self.queue.end_stream(stream, handle.worker.failure)
        self.restarting.add(handle)
        handle.renew([Process(9)])
        self.queue.dispatch()

    def come_back(self, handle, _):
        if handle in self.restarting:
            self.restarting.discard(handle)
            handle.note_committed(1)
            self.queue.dispatch()

    def update(self, handle, _):
        if handle.state == "serving":
            handle.begin_update(handle.version + 1, [])
            self.queue.dispatch()

    def commit(self, handle, _):
        if handle.state == "updating":
            handle.note_committed(handle.version + 1)
            self.queue.dispatch()

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
            sizes = [len(handle.worker.left(number)) for number in handle.worker.asked]
            assert handle.load == sum(sizes)
            # A request goes as a whole: the last one may be more than there is room for.
            assert not sizes or sum(sizes) - max(sizes) < ROOM

    def _hear(self, handle, *events):
        for stream in self._streams_of(handle):
            self.queue.receive(stream, events)

    def _streams_of(self, handle):
        return [each for each in self.queue.streams if each.worker is handle.worker]


ACTIONS = st.sampled_from(
    ["ask", "ask", "ask", "tell", "tell", "end_sample", "answer", "cut", "die", "come_back", "update", "commit"]
)


@settings(max_examples=600)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, ENGINES - 1), st.integers(0, 9)), max_size=60))
def test_the_oldest_go_first_in_bounded_numbers_and_all_any_serving_whoever_dies(script) -> None:
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
        found = [fetch(turn.token_ids).tolist() for turn in each.answer.result(0)]
        assert found == [whole(draw, sample) for sample in range(each.request.sampling.samples)]
        assert all(turn.finish_reason == "stop" for turn in each.answer.result(0))


def test_a_sample_that_ends_makes_room_while_the_longest_of_its_request_goes_on() -> None:
    played = Played(starting=[1, 2])
    for _ in range(3):
        played.ask(None, 2)
    handle = played.handles[0]
    assert [each.handle for each in played.asked] == [handle, handle, None]
    loads = []
    for _ in range(2):
        loads.append(handle.load)
        played.end_sample(handle, 0)
    assert loads == [6, 5]
    # Also where there is news of what nobody waits for any more.
    played._hear(handle, SamplesEnded([99]))
    played.end_sample(handle, 1)
    assert (played.asked[2].handle, handle.load) == (handle, 6)
    # The one that is left counts until it ends, the others no more.
    played.answer(handle, 0)
    assert handle.load == 5


class Restarting:
    """Restarts that come to no end."""

    def __init__(self):
        self.lock = threading.RLock()
        self.under_way = set()

    def awaits(self, handle):
        return handle in self.under_way

    def begin(self, handle):
        self.under_way.add(handle)
        handle.renew([Process(9)])

    def go_on(self):
        pass


def test_others_are_asked_while_a_refit_has_to_do_with_restarts() -> None:
    played, restarts = Played(), Restarting()
    router = Router(played.handles, restarts)
    played.queue = router.queue
    played.ask(None, 0)
    refitting, is_over = threading.Event(), threading.Event()

    def refit() -> None:
        with restarts.lock:
            refitting.set()
            is_over.wait(30)

    holder, looking = threading.Thread(target=refit), threading.Thread(target=router.check_engines)
    holder.start()
    assert refitting.wait(30)
    # One dies meanwhile, and is restarted by whoever has the lock, or when it is free.
    dead = played.asked[0].handle
    dead.worker.failure = WorkerGone("it was killed", "nothing", dead.worker.log)
    looking.start()
    looking.join(20)
    was_stuck = looking.is_alive()
    played.ask(None, 0)
    is_over.set()
    holder.join()
    looking.join()
    assert not was_stuck
    assert dead.state == "down"
    assert played.asked[1].handle.state == "serving"
    router.check_engines()
    assert restarts.awaits(dead)


class Counted(EngineHandle):
    """An engine that counts how often it is looked at."""

    looks = 0

    @property
    def state(self):
        self.looks += 1
        return super().state


def looks_at(played, action):
    """How often engines were looked at meanwhile."""
    before = sum(handle.looks for handle in played.handles)
    action()
    return sum(handle.looks for handle in played.handles) - before


def test_an_engine_that_waits_for_weights_does_not_let_all_that_waits_be_looked_through() -> None:
    played = Played(Counted, starting=[0])
    for _ in range(200):
        played.ask(None, 0)
    assert sum(each.handle is None for each in played.asked) > 150
    assert looks_at(played, played.queue.dispatch) < 5 * ENGINES


def test_news_of_samples_that_go_on_let_no_engine_be_looked_at() -> None:
    played = Played(Counted)
    for _ in range(200):
        played.ask(None, 0)
    process = played.handles[0].worker
    (stream,) = (each for each in played.queue.streams if each.worker is process)
    number = process.running()[0]
    told = process.tell(number)
    assert len(told.samples)
    assert looks_at(played, lambda: played.queue.receive(stream, [told])) == 0
    answer = process.answer(number, is_cut=False)
    assert looks_at(played, lambda: played.queue.receive(stream, [answer])) > 0


def test_an_engine_whose_call_has_ended_is_asked_to_tell_on_and_keeps_its_requests() -> None:
    played = Played()
    played.ask(None, 0)
    (asked,) = played.asked
    handle = asked.handle
    played.tell(handle, 0)
    (stream,) = played.queue.streams
    (told,) = played.queue.partial_turns([asked])
    assert fetch(told[0].token_ids).tolist() == whole(0, 0)[:1]
    assert not played.queue.end_stream(stream, None)
    (again,) = played.queue.streams
    assert again.worker is stream.worker
    assert again.references != stream.references
    (kept,) = played.queue.partial_turns([asked])
    assert fetch(kept[0].token_ids).tolist() == whole(0, 0)[:1]
    assert (asked.handle, handle.load) == (handle, 1)
    assert asked.number in handle.worker.asked
    played.answer(handle, 0)
    assert fetch(asked.answer.result(0)[0].token_ids).tolist() == whole(0, 0)


def test_nobody_is_asked_for_anything_while_it_is_counted_how_long_engines_were_idle() -> None:
    could_ask = []

    class Counting(EngineHandle):
        def take_idle_s(self):
            asking = threading.Thread(target=played.ask, args=(None, 0))
            asking.start()
            asking.join(0.1)
            could_ask.append(not asking.is_alive())
            threads.append(asking)
            return super().take_idle_s()

    played, threads = Played(Counting), []
    idle_s = played.queue.take_idle_s()
    for each in threads:
        each.join()
    assert len(idle_s) == ENGINES
    assert could_ask == [False] * ENGINES
    assert all(each.handle is not None for each in played.asked)
