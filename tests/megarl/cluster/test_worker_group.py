"""Groups of worker processes: results in order, and the first failure with its reason."""

import signal
import stat
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from eventually import eventually

from converters.errors import UserError
from megarl.cluster import worker_group
from megarl.cluster.placement import ActorResources, engine_resources, trainer_resources
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.worker_group import Call, WorkerFailed, WorkerGone, WorkerGroup, wait, wait_together
from megarl.schema import ClusterConfig, RolloutConfig

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
def make_group(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(worker_group, "_CONSEQUENCES_S", 3.0)

    def make(cpus: float = 0) -> WorkerGroup:
        environment = {"PYTHONPATH": str(tmp_path), "MEGARL_TEST": "seen"}
        resources = ActorResources(cpus=cpus, gpus=0, environment=environment, timeout_s=1 if cpus else 120)
        group = WorkerGroup("worker", 2, resources, tmp_path / "logs")
        group.make("program", "Program", [(0,), (1,)])
        return group

    return make


def test_workers_answer_in_their_order_also_after_a_failure_and_end_with_the_group(make_group, tmp_path):
    with make_group() as group:
        assert group.call("rank_plus", 10) == [10, 11]
        assert group.call("environment", "MEGARL_TEST") == ["seen", "seen"]
        with pytest.raises(WorkerFailed, match="a fault of the program"):
            group.call("fail")
        # The consequence comes first, and is not what is told.
        with pytest.raises(WorkerFailed, match="ZeroDivisionError: a fault of the program"):
            play(group, "lose_a_peer", "fail_later")
        with pytest.raises(WorkerFailed, match="ConnectionError: a peer is gone"):
            play(group, "lose_a_peer", "pid")
        assert wait(group.begin_each("rank_plus", [(1,), (2,)])) == [1, 3]
        first, second = group.nodes()
        assert first == second
        pids = group.call("pid")
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert [(tmp_path / "logs" / f"worker_{i}.log").read_text() for i in (0, 1)] == ["closed in order\n"] * 2


def test_a_failure_arrives_while_others_wait(make_group):
    # A group that is left with an error is not waited for either.
    with pytest.raises(WorkerFailed, match=r"worker_0 gave no answer for 0\.5 s"), make_group() as group:
        fail_beside_one_that_stands_still(group)


def fail_beside_one_that_stands_still(group):
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: a fault of the program"):
        play(group, "sleep", "fail")
    with pytest.raises(UserError, match=r"^rank 1 was given nonsense$"):
        group.call("refuse")
    wait(group.begin("sleep"), timeout_s=0.5)


def test_dead_worker_is_reported_with_its_last_lines(make_group):
    with pytest.raises(WorkerFailed, match="the last words of rank 1"), make_group() as group:
        group.call("die")


def test_a_death_is_told_and_not_its_consequence_which_comes_first(make_group, tmp_path):
    with pytest.raises(WorkerGone, match="the process of worker_1 died") as caught, make_group() as group:
        play(group, "lose_a_peer", "die_later")
    assert "\n" not in caught.value.sentence
    assert caught.value.details.startswith(f"The end of {tmp_path}/logs/worker_1.log:")
    # Nor where nobody said what a consequence looks like.
    with pytest.raises(WorkerGone, match="the process of worker_1 died"), make_group() as group:
        wait(group.begin_each("play", [("lose_a_peer",), ("die_later",)]))


def test_what_ray_ends_for_memory_is_a_sentence_and_on_one_machine_it_ends_nothing(monkeypatch, tmp_path):
    def get(_call):
        raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(ray, "get", get)
    worker = SimpleNamespace(log=tmp_path / "trainer_3.log", failure=None)
    failure = worker_group._failure(Call(worker, None))
    assert isinstance(failure, WorkerGone)
    assert failure.sentence.startswith("Ray ended trainer_3, because the memory of its machine was nearly full: ")
    raylet = Path(ray._private.worker._global_node.get_logs_dir_path()) / "raylet.out"
    assert "MemoryMonitor disabled" in raylet.read_text()


def play(group, *parts):
    """Each worker its part, in which they need each other."""
    wait_together(group.begin_each("play", [(part,) for part in parts]), consequence=ConnectionError)


def test_cluster_without_room_is_a_user_error(make_group):
    with pytest.raises(UserError, match="after 1 s only 0 of 2 worker processes run: each asks for 100 CPUs"):
        make_group(cpus=100)


def test_temporary_files_of_workers_lie_where_they_go_with_the_run():
    """vLLM leaves a file behind for every engine, and what is killed leaves all."""
    for resources in (trainer_resources(ClusterConfig()), engine_resources(ClusterConfig(), RolloutConfig())):
        folder = Path(resources.environment["TMPDIR"])
        assert folder.is_dir()
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert (folder.parent / "held").is_file()


def test_ray_leaves_the_signals_of_the_process_alone():
    caught = int(Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0], 16)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not caught & 1 << signal.SIGTERM - 1
