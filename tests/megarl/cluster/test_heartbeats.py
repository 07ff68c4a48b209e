"""How long somebody was silent, in virtual time."""

from types import SimpleNamespace

import pytest

from megarl.cluster.workers import heartbeats as module
from megarl.cluster.workers.heartbeats import Heartbeats


class FakeWorker:
    """A worker that answers when it is told to."""

    silence_s = 10.0

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append(SimpleNamespace(worker=self, reference=object()))
        return self.calls[-1]


@pytest.fixture
def world(monkeypatch):
    """The time, and the references of calls that have ended."""
    world = SimpleNamespace(now_s=0.0, ended=[])
    monkeypatch.setattr(module.time, "monotonic", lambda: world.now_s)

    def wait(references, num_returns, timeout):
        assert (num_returns, timeout) == (len(references), 0)
        return [each for each in references if each in world.ended], None

    monkeypatch.setattr(module.ray, "wait", wait)
    return world


def looks(heartbeats, world, times_s, workers):
    """The silent ones that are found at each of these times."""
    found = []
    for world.now_s in times_s:
        found.append(heartbeats.look({worker: worker.begin for worker in workers}).silent)
    return found


def test_one_that_does_not_answer_is_told_when_its_time_is_over_and_asked_once(world):
    heartbeats, lively, silent = Heartbeats(1.0), FakeWorker(), FakeWorker()
    for now_s in range(1, 11):
        world.now_s = now_s
        looked = heartbeats.look({lively: lively.begin, silent: silent.begin})
        assert looked.silent == []
        assert [call.worker for call in looked.ended] == [lively] * (now_s > 1)
        world.ended = [lively.calls[-1].reference]
    assert looks(heartbeats, world, [11], [lively, silent]) == [[silent]]
    assert len(silent.calls) == 1


def test_time_in_which_nobody_listened_is_no_silence(world):
    heartbeats, worker = Heartbeats(1.0), FakeWorker()
    assert looks(heartbeats, world, [1, 500, 1000, 1500, 2000], [worker]) == [[]] * 5
    assert looks(heartbeats, world, [3000], [worker]) == [[worker]]


def test_the_silence_of_one_that_need_not_answer_is_forgotten(world):
    heartbeats, worker = Heartbeats(1.0), FakeWorker()
    looks(heartbeats, world, range(1, 9), [worker])
    looks(heartbeats, world, [9], [])
    assert looks(heartbeats, world, range(10, 20), [worker]) == [[]] * 10
    assert looks(heartbeats, world, [20], [worker]) == [[worker]]


def test_it_is_due_after_its_interval(world):
    heartbeats = Heartbeats(5.0)
    world.now_s = 4.9
    assert not heartbeats.is_due
    world.now_s = 5.0
    assert heartbeats.is_due
    heartbeats.look({})
    assert not heartbeats.is_due
