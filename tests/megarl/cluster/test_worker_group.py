"""Groups of worker processes: results in order, and the first failure with its reason."""

import textwrap
import time

import psutil
import pytest
import ray

from converters.errors import UserError
from megarl.cluster import worker_group
from megarl.cluster.placement import Place
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.worker_group import WorkerFailed, WorkerGroup, wait_together
from megarl.config.schema import ClusterConfig

PROGRAM = """
import os, time
from converters.errors import UserError

class Program:
    def __init__(self, rank):
        self.rank = rank

    def pid(self):
        return os.getpid()

    def rank_plus(self, number):
        return self.rank + number

    def environment(self, name):
        return os.environ.get(name)

    def refuse(self):
        if self.rank == 1:
            raise UserError("rank 1 was given nonsense")
        # The others wait for rank 1, as in a collective.
        time.sleep(600)

    def fail(self):
        raise ZeroDivisionError("a fault of the program")

    def die(self):
        if self.rank == 1:
            print("the last words of rank 1", flush=True)
            os._exit(7)
        time.sleep(600)

    def sleep(self):
        time.sleep(600)

    def play(self, part):
        return getattr(self, part)()

    def lose_a_peer(self):
        raise ConnectionError("a peer is gone")

    def die_later(self):
        time.sleep(self.rank)
        os._exit(7)

    def fail_later(self):
        time.sleep(self.rank)
        self.fail()

    def close(self):
        print("closed in order", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with ray_cluster(ClusterConfig(trainer_ranks=2)):
        yield
    assert not ray.is_initialized()


@pytest.fixture
def make_group(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def make(cpus: float = 0) -> WorkerGroup:
        environment = {"PYTHONPATH": str(tmp_path), "MEGARL_TEST": "seen"}
        place = Place(cpus=cpus, gpus=0, environment=environment, timeout_s=5 if cpus else 120)
        group = WorkerGroup("worker", 2, place, tmp_path / "logs")
        group.make("program", "Program", [(0,), (1,)])
        return group

    return make


def test_results_come_in_the_order_of_the_workers(make_group, tmp_path):
    with make_group() as group:
        assert group.call("rank_plus", 10) == [10, 11]
        assert group.wait(group.begin_each("rank_plus", [(1,), (2,)])) == [1, 3]
        assert group.call("environment", "MEGARL_TEST") == ["seen", "seen"]
        first, second = group.nodes()
        assert first == second
    assert [(tmp_path / "logs" / f"worker_{i}.log").read_text() for i in (0, 1)] == ["closed in order\n"] * 2


def test_user_error_of_a_worker_arrives_as_such_while_others_wait(make_group):
    with pytest.raises(UserError, match=r"^rank 1 was given nonsense$"), make_group() as group:
        group.call("refuse")


def test_fault_of_the_program_keeps_its_traceback(make_group):
    with pytest.raises(WorkerFailed, match="a fault of the program"), make_group() as group:
        group.call("fail")


def test_dead_worker_is_reported_with_its_last_lines(make_group):
    with pytest.raises(WorkerFailed, match="the last words of rank 1"), make_group() as group:
        group.call("die")


def test_a_call_that_takes_too_long_is_given_up(make_group):
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"no answer for 0\.5 s"), make_group() as group:
        group.wait(group.begin("sleep"), timeout_s=0.5)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        # The consequence comes first, and is not what is told.
        (("lose_a_peer", "die_later"), "the process died"),
        (("lose_a_peer", "fail_later"), "ZeroDivisionError: a fault of the program"),
        (("lose_a_peer", "pid"), "ConnectionError: a peer is gone"),
        # The other one stands still.
        (("sleep", "fail"), "ZeroDivisionError: a fault of the program"),
    ],
)
def test_of_workers_that_need_each_other_the_first_cause_is_told(make_group, monkeypatch, parts, message):
    monkeypatch.setattr(worker_group, "_CONSEQUENCES_S", 3.0)

    def play(group):
        wait_together(group.log_of(group.begin_each("play", [(part,) for part in parts])), consequence=ConnectionError)

    with pytest.raises(WorkerFailed, match=message), make_group() as group:
        play(group)


def test_cluster_without_room_is_a_user_error(make_group):
    with pytest.raises(UserError, match="after 5 s only 0 of 2 worker processes run: each asks for 100 CPUs"):
        make_group(cpus=100)


def test_processes_end_with_the_group(make_group):
    with make_group() as group:
        pids = group.call("pid")
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
