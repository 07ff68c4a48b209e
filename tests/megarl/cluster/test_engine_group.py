"""Engines as one: who gets a request, whose weights are replaced, and what is known of each. The engines echo."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from echo_engine import DEADLY, RELUCTANT, SLOW
from echo_engine import ask as request
from echo_kind import ECHO
from eventually import descendants, eventually, has_ended

import megarl.rollout
from converters.errors import UserError
from megarl.cluster.engines import engine_group, router
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.reachability import check_that_all_meet, meeting
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, engine_role
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import WorkerGone
from megarl.process.ports import free_port
from megarl.schema import ClusterConfig, RolloutConfig

pytestmark = pytest.mark.usefixtures("shared_cluster")


@pytest.fixture
def open_group(tmp_path, monkeypatch):
    monkeypatch.setitem(megarl.rollout.ENGINES, "echo", ECHO)

    @contextmanager
    def make(replicas):
        config = RolloutConfig(engine="echo", replicas=replicas)
        with (
            reserve([engine_role(ClusterConfig(), config)], ClusterConfig()) as seats,
            EngineGroup(config, seats[ENGINE], tmp_path) as engines,
        ):
            yield engines

    return make


@pytest.mark.long
def test_an_engine_over_machines_that_do_not_meet_or_of_which_one_vanishes_is_told(open_group):
    with pytest.raises(WorkerGone, match=r"^the process of engine_1 died"):
        start_one_over_machines(open_group, started := [])
    assert eventually(lambda: all(map(has_ended, started)))


def start_one_over_machines(open_group, started):
    with open_group(2) as engines:
        # One engine of both processes, on two machines as far as they know.
        workers = engines.processes.workers
        engines.handles = [EngineHandle(workers)]
        list(map(wait, meeting(workers)))
        # Actors of an earlier test may still be about to end.
        assert eventually(lambda: len(actors()) == 2)
        started += actors()
        addresses = [*wait([workers[0].begin_listen()]), ("127.0.0.1", free_port("127.0.0.1"))]
        says = rf"^engine_0 does not reach engine_1 at 127\.0\.0\.1:{addresses[1][1]} \(.*refused\): the machines"
        with pytest.raises(UserError, match=says):
            check_that_all_meet(workers, addresses, wait([worker.begin_unreached(addresses) for worker in workers]))
        engines.wait_started(engines.begin_start(Path("model"), load_weights=True))


def actors():
    return [process for process, command in descendants().items() if "WorkerActor" in command]


def spread(engines, requests):
    """The answers without the process that gave them, and the processes that answered each request."""
    answers = engines.generate(requests)
    tokens = [[turn.token_ids for turn in turns] for turns in answers]
    servers = [{each[-1] for each in own} for own in tokens]
    return [[each[:-1] for each in own] for own in tokens], servers


def states(engines):
    return [(handle.state, handle.version, handle.load) for handle in engines.handles]


def test_a_life_of_two_engines(open_group):
    """In one test, because processes take seconds to start."""
    with pytest.raises(WorkerGone, match="the process of engine_0 died"), open_group(2) as engines:
        live_and_lose_one(engines)


def live_and_lose_one(engines):
    engines.wait_started(engines.begin_start(Path("model"), load_weights=False))
    here = engines.nodes()[0]
    assert engines.worker_nodes() == [here] * 4
    assert states(engines) == [("starting", -1, 0)] * 2
    update(engines, 1)
    assert states(engines) == [("serving", 1, 0)] * 2
    check_that_requests_go_to_the_least_loaded(engines)
    check_that_a_conversation_comes_back_to_its_prefix(engines)
    check_that_one_is_written_while_the_other_serves(engines)
    check_that_requests_wait_where_none_serves(engines)
    check_that_engines_are_asked_for_what_they_have_room_for(engines)
    check_that_an_answer_nobody_waits_for_is_no_load(engines)
    check_that_engines_have_taken_in_all_that_they_were_asked_for_when_they_sleep(engines)
    check_that_many_answers_are_heard_together(engines)
    check_that_all_their_processes_are_recorded(engines)
    lose_the_first(engines)


def check_that_engines_have_taken_in_all_that_they_were_asked_for_when_they_sleep(engines):
    asked = [engines.begin_generate([request(token)]) for token in (RELUCTANT, 1, 2, 3)]
    engines.sleep()
    asleep = engines.begin_generate([request(4)])
    assert [(handle.is_asleep, handle.has_room) for handle in engines.handles] == [(True, False)] * 2
    engines.wake_up(["kv_cache", "weights"])
    for (each,) in (*asked, asleep):
        assert each.answer.result(60)


def update(engines, version):
    engines.begin_update(version, ["weight"], timeout_s=60)
    engines.commit_update(version, timeout_s=60)


def check_that_requests_go_to_the_least_loaded(engines):
    requests = [request(1, samples=4), request(2), request(3), request(4, samples=2), request(5)]
    answers, servers = spread(engines, requests)
    assert all(len(each) == 1 for each in servers)
    (first,), (second,) = servers[:2]
    # As many conversations each; where these are equal, to the one with fewer samples to give.
    assert servers == [{first}, {second}, {second}, {first}, {second}]
    assert states(engines) == [("serving", 1, 0)] * 2
    # Wherever they go, the answers are the same.
    alone, own = spread(engines.only(1), requests)
    assert (alone, own) == (answers, [{second}] * 5)
    assert answers[0] == [[1, 101, sample] for sample in range(4)]


def check_that_a_conversation_comes_back_to_its_prefix(engines):
    _, ((first,), (second,)) = spread(engines, [request(1, conversation=7), request(2, conversation=8)])
    _, servers = spread(engines, [request(3, conversation=8), request(4, conversation=8), request(5, conversation=7)])
    assert servers == [{second}, {second}, {first}]


def check_that_one_is_written_while_the_other_serves(engines):
    before = [spread(engines.only(number), [request(1)])[1][0] for number in range(2)]
    one = engines.only(0)
    one.begin_update(2, ["weight"], timeout_s=60)
    assert [state for state, _, _ in states(engines)] == ["updating", "serving"]
    answers = engines.generate([request(prompt) for prompt in range(4)])
    assert {(turn.token_ids[-1], turn.versions[0]) for (turn,) in answers} == {(*before[1], 1)}
    one.commit_update(2, timeout_s=60)
    assert states(engines) == [("serving", 2, 0), ("serving", 1, 0)]
    answers = engines.generate([request(prompt) for prompt in range(4)])
    assert [turn.versions[0] for (turn,) in answers] == [2, 1, 2, 1]


def check_that_requests_wait_where_none_serves(engines):
    engines.begin_update(3, ["weight"], timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(engines.generate, [request(prompt, samples=3) for prompt in range(2)])
        assert eventually(lambda: states(engines) == [("updating", 2, 3), ("updating", 1, 3)])
        assert not generating.done()
        engines.commit_update(3, timeout_s=60)
        assert {turn.versions[0] for turns in generating.result(60) for turn in turns} == {3}
    assert states(engines) == [("serving", 3, 0)] * 2


def check_that_engines_are_asked_for_what_they_have_room_for(engines):
    engines.begin_update(4, ["weight"], timeout_s=60)
    for handle in engines.handles:
        handle._room = 2
    requests = [request(prompt, priority=9 - prompt) for prompt in range(9)]
    asked = engines.begin_generate(requests)
    assert [load for _, _, load in states(engines)] == [2, 2]
    # The lowest go first, and wait for nobody.
    assert [each.request.priority for each in asked if each.handle is not None] == [4, 3, 2, 1]
    engines._queue.abandon(asked[-1:])
    assert asked[4].handle is not None
    assert asked[3].handle is None
    engines.commit_update(4, timeout_s=60)
    answers = [each.answer.result(60) for each in asked[:-1]]
    assert [turn.token_ids[:2] for (turn,) in answers] == [[prompt, prompt + 100] for prompt in range(8)]
    assert states(engines) == [("serving", 4, 0)] * 2
    for handle in engines.handles:
        handle._room = None


def check_that_an_answer_nobody_waits_for_is_no_load(engines):
    answers = engines.generate_each([request(prompt) for prompt in (1, 2, SLOW, SLOW)])
    next(answers)
    assert 2 <= sum(load for _, _, load in states(engines)) <= 3
    answers.close()
    assert list(engines.generate_stream(request(9))) == [[9]]
    assert states(engines) == [("serving", 4, 0)] * 2


def check_that_many_answers_are_heard_together(engines):
    with mock.patch.object(router, "next_of", side_effect=router.next_of) as listened:
        answers = engines.generate([request(prompt) for prompt in range(600)])
    assert [turn.token_ids[0] for (turn,) in answers] == list(range(600))
    assert listened.call_count < 100


def check_that_all_their_processes_are_recorded(engines):
    engines.start_profiler()
    recorded = engines.stop_profiler(100, 0.0)
    assert list(recorded) == ["engine_0", "engine_1", "engine_0 worker 0", "engine_1 worker 0"]
    assert recorded["engine_1 worker 0"] == b'{"name": "echo"}'
    with mock.patch.object(engine_group, "_MOST_RECORDED", 1):
        engines.start_profiler()
    assert list(engines.stop_profiler(100, 0.0)) == ["engine_0", "engine_0 worker 0"]


def lose_the_first(engines):
    with pytest.raises(WorkerGone, match="the process of engine_0 died"):
        engines.generate([request(DEADLY)])
    assert states(engines) == [("down", 4, 0), ("serving", 4, 0)]
    answers, servers = spread(engines, [request(prompt) for prompt in range(3)])
    assert answers == [[[prompt, prompt + 100, 0]] for prompt in range(3)]
    assert len(set.union(*servers)) == 1
    engines.begin_update(5, ["weight"], timeout_s=60)
