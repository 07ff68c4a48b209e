"""A direct path, of ranks and engines that note what they are asked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megarl.refit import direct
from megarl.refit.direct import DirectPath
from megarl.refit.path import Receivers
from megarl.refit.transport_choice import NO_RDMA, Rdma, Route
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.schema import RefitConfig


class Noting:
    """Ranks or engines: the name of each method that was called, and its last argument."""

    def __init__(self, name, asked, **answers):
        self._name, self._asked, self._answers = name, asked, answers

    def __len__(self):
        return 1

    def __getattr__(self, method):
        def call(*arguments):
            self._asked.append((self._name, method, *arguments[-1:]))
            answer = self._answers.get(method, [])
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


BY_HARDWARE = Route("rdma", Rdma(by_hardware=True, restriction=""))


def path_of(asked, route=BY_HARDWARE, *, delta=False, **of_engines):
    path = object.__new__(DirectPath)
    path._trainer = SimpleNamespace(
        weights=Noting("trainer", asked, open_transfer=[("there", 1)], open_store=("there", 2))
    )
    path._receivers = Receivers(Noting("engines", asked, open_transfer=[("here", 1)], **of_engines), [])
    path._all_engines = Noting("all engines", asked)
    path._spec = SimpleNamespace(traces=[None, None], topology="two machines")
    path._config, path._route = RefitConfig(verify="off", delta=delta, timeout_s=5.0), route
    return path


@pytest.mark.parametrize("delta", [False, True])
def test_receivers_let_go_of_memory_before_it_is_freed_and_all_know_how_it_is_read(monkeypatch, delta):
    monkeypatch.setattr(direct, "wait_together", lambda *_: None)
    asked = []
    path_of(asked, delta=delta).connect()
    assert [each[:2] for each in asked] == [
        ("all engines", "disconnect_transfer"),
        ("engines", "open_transfer"),
        ("trainer", "open_transfer"),
        ("trainer", "begin_connect"),
        ("engines", "begin_connect"),
    ]
    meeting, other = asked[3][2], asked[4][2]
    assert len(meeting.key) == 32
    assert meeting == other
    assert replace(meeting, key=b"") == Rendezvous(
        "rdma",
        b"",
        [("there", 1)],
        None,
        2,
        5.0,
        [("here", 1)],
        with_checksum=delta,
        with_changes=delta,
        by_hardware=True,
    )


def test_between_machines_all_know_who_is_where_and_a_store_is_made_for_those_that_need_one(monkeypatch):
    monkeypatch.setattr(direct, "wait_together", lambda *_: None)
    asked = []
    path_of(asked, Route("tcp", NO_RDMA, within="shared_memory")).connect()
    meeting = asked[-1][2]
    assert (meeting.transport, meeting.store, meeting.topology) == ("tcp", ("there", 2), "two machines")
    assert not meeting.by_hardware


class Listed:
    """Engines, each of which is the process that answers for it."""

    def __init__(self, *workers):
        self._workers = workers

    def __len__(self):
        return len(self._workers)

    def workers(self):
        return [*self._workers]

    def excluding(self, workers):
        return Listed(*(each for each in self._workers if each not in workers))

    def worker_nodes(self):
        return ["here"] * len(self)


def test_engines_are_traced_once_wherever_the_path_leads_meanwhile(monkeypatch):
    monkeypatch.setattr(direct, "replace", lambda spec, **_: spec)
    traced = []
    path = object.__new__(DirectPath)
    path._receivers, path._traced = Receivers.of(Listed("0", "1", "2")), ["0", "1", "2"]
    path._trainer_nodes, path._spec = ["here"], SimpleNamespace(traces=["there"])
    path._trace = lambda engines: traced.append(engines.workers()) or ["there"]
    # Engine 1 dies, and another one catches up before the path leads to all of them.
    path.set_engines(Listed("1, restarted"))
    path.set_engines(Listed("0", "1, restarted", "2"))
    path.set_engines(Listed("0", "2"))
    path.set_engines(Listed("0", "1, restarted", "2"))
    assert traced == [["1, restarted"]]
    path._trace = lambda _: ["elsewhere"]
    with pytest.raises(RuntimeError, match="keeps its weights elsewhere"):
        path.set_engines(Listed("0", "1, restarted", "2, restarted"))


@pytest.mark.parametrize("failure", [None, RuntimeError("the engine is gone")])
def test_both_ends_are_closed_the_receiving_one_first(failure):
    asked = []
    path = path_of(asked, **({"close_transfer": failure} if failure else {}))
    if failure is None:
        path.close()
    else:
        with pytest.raises(RuntimeError, match="the engine is gone"):
            path.close()
    assert [each[:2] for each in asked] == [
        ("all engines", "disconnect_transfer"),
        ("engines", "close_transfer"),
        ("trainer", "close_transfer"),
    ]
