"""Groups of worker processes: results in order, and the first failure with its reason."""

import os
import platform
import re
import signal
import stat
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from eventually import descendants, eventually, has_ended
from ray.experimental import get_object_locations

from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.cluster.placement.placement import Role
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import engine_role, trainer_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.workers import calls, idle_ranks
from megarl.cluster.workers.calls import wait, wait_together
from megarl.cluster.workers.idle_ranks import IdleRanks
from megarl.cluster.workers.method_names import MethodNames
from megarl.cluster.workers.streams import End, Stream, next_of, next_part, results_of
from megarl.cluster.workers.worker import Call, WorkerFailed, WorkerGone
from megarl.cluster.workers.worker_group import WorkerGroup, in_order_of_gpus
from megarl.data.stretches import StoredArray, ValuesGone, fetch
from megarl.process.errors import MachinesUnfit
from megarl.schema import ClusterConfig, PoolConfig, RolloutConfig

PROGRAM = """
import os, sys, time
import numpy as np
from converters.errors import UserError
from megarl.data.stretches import ValuesGone, fetch

class Program:
    def __init__(self, rank):
        self.rank = rank

    def pid(self):
        return os.getpid()

    def has_imported(self, module):
        return module in sys.modules

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

    def say(self, words):
        print(words, flush=True)

    def give(self, count):
        for number in range(count):
            many = np.arange(30_000, dtype=np.int32) + number
            yield number, [many, np.arange(3), many, many / 0.1], "text"

    def lose(self):
        raise ValuesGone("ObjectRef(00ff) is gone")

    def read(self, values):
        return int(fetch(values)[-1])

    def close(self):
        print("closed in order", flush=True)
"""
Program = MethodNames()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Ray only numbers them.
        patch.setattr(ray, "init", partial(ray.init, num_gpus=4))
        with ray_cluster(ClusterConfig(trainer_ranks=2)):
            yield
    assert not ray.is_initialized()


@pytest.fixture
def make_group(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(calls, "_CONSEQUENCES_S", 3.0)

    with ExitStack() as stack:

        def make(gpus: int = 0, silence_s: float = 600) -> WorkerGroup:
            environment = {"PYTHONPATH": str(tmp_path), "MEGARL_TEST": "seen"}
            role = Role("worker", 2, cpus=0.5, gpus=gpus, environment=environment)
            # Both halves of the one CPU: what an earlier group of the test had is free again, or there is no room.
            stack.close()
            seats = stack.enter_context(reserve([role], ClusterConfig(silence_timeout_s=silence_s)))
            group = WorkerGroup(seats["worker"], tmp_path / "logs")
            group.make("program", "Program", [(0,), (1,)])
            return group

        yield make


def test_workers_answer_in_their_order_also_after_a_failure_and_end_with_the_group(make_group, tmp_path, monkeypatch):
    # By a version that let all read it, in an earlier run.
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker_0.log").touch(0o644)
    with make_group() as group:
        copies, get = [], ray.get
        monkeypatch.setattr(ray, "get", lambda reference: copies.append(reference) or get(reference))
        assert group.call(Program.rank_plus, 10) == [10, 11]
        assert len(copies) == 2, "each result is copied out of the store once"
        assert group.call(Program.environment, "MEGARL_TEST") == ["seen", "seen"]
        # It costs a start 1.5 s of a core, and what the process holds may do without.
        assert group.call(Program.has_imported, "torch") == [False, False]
        with pytest.raises(WorkerFailed, match="a fault of the program"):
            group.call(Program.fail)
        # The consequence comes first, and is not what is told.
        monkeypatch.setattr(calls, "_CONSEQUENCES_S", 60.0)
        with pytest.raises(WorkerFailed, match="ZeroDivisionError: a fault of the program"):
            play(group, "lose_a_peer", "fail_later")
        with pytest.raises(WorkerFailed, match="ConnectionError: a peer is gone"):
            play(group, "lose_a_peer", "pid")
        assert wait(group.begin_each(Program.rank_plus, [(1,), (2,)])) == [1, 3]
        first, second = group.nodes()
        assert first == second
        pids = group.call(Program.pid)
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    for number, pid in enumerate(pids):
        log = tmp_path / "logs" / f"worker_{number}.log"
        # Libraries may print what is nobody else's.
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        head, *rest = log.read_text().splitlines()
        # A log says by itself where to look, and where another run begins.
        assert re.fullmatch(rf"[-\d]+ [:\d]+ worker_{number} is process {pid} on {platform.node()}", head)
        assert rest == ["closed in order"]


def test_a_cluster_starts_nothing_that_no_run_needs():
    commands = descendants().values()
    assert any("raylet" in command for command in commands)
    assert not [each for each in commands if "autoscaler" in each or "log_monitor" in each]


def test_processes_are_numbered_by_machine_and_gpu(make_group, tmp_path):
    nodes = ["a", "a", "a", "b", "b"]
    assert in_order_of_gpus(nodes, [["10"], ["9"], ["0"], ["1"], ["0"]]) == [2, 1, 0, 4, 3]
    with make_group(gpus=1) as group:
        assert group.call(Program.environment, "CUDA_VISIBLE_DEVICES") == ["0", "1"]
        first, second = group.call(Program.pid)
        group.renumber([1, 0])
        assert group.call(Program.pid) == [second, first]
        group.workers[0].begin("say", "I am the first")
    written = (tmp_path / "logs" / "worker_0.log").read_text().splitlines()
    assert [line for line in written if " is process " not in line] == ["I am the first", "closed in order"]


def test_a_failure_arrives_while_others_wait(make_group):
    # A group that is left with an error is not waited for either.
    with pytest.raises(WorkerFailed, match=r"worker_0 gave no answer for 0\.5 s"), make_group() as group:
        fail_beside_one_that_stands_still(group)


def fail_beside_one_that_stands_still(group):
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: a fault of the program"):
        play(group, "sleep", "fail")
    with pytest.raises(UserError, match=r"^rank 1 was given nonsense$"):
        group.call(Program.refuse)
    wait(group.begin(Program.sleep), timeout_s=0.5)


def test_dead_worker_is_reported_with_its_last_lines(make_group):
    with pytest.raises(WorkerFailed, match="the last words of rank 1"), make_group() as group:
        group.call(Program.die)


def test_long_arrays_of_a_stream_stay_with_the_worker_until_they_are_read(make_group):
    with make_group() as group:
        first, second = group.workers
        found = [result for _, result in results_of([Stream.begin(first, "give", 3), Stream.begin(second, "give", 2)])]
        assert sorted(number for number, _, _ in found) == [0, 0, 1, 1, 2]
        for number, (many, few, again, floats), text in found:
            assert (type(many), type(floats), few.tolist(), text) == (StoredArray, StoredArray, [0, 1, 2], "text")
            assert again == many
            assert get_object_locations([many.reference])[many.reference]["node_ids"], "in the store, not here"
            assert (len(many), many.dtype, floats.dtype, floats.is_finite) == (30_000, "<i4", "<f8", True)
            assert wait([worker.begin("read", many) for worker in group.workers]) == [29_999 + number] * 2
            assert fetch(floats)[1] == (1 + number) / 0.1
        with pytest.raises(ValuesGone) as caught:
            wait([second.begin("lose")])
        # A failure in place of an array, and of what follows the last one.
        for count, arrays in ((3, 1), (1, 1)):
            given = [ray.put(("rest", count)), *(ray.put(np.arange(3)) for _ in range(arrays))]
            stream = Stream(first, iter([*given, first.begin("fail").reference]))
            end = next(part for part in iter(partial(next_part, stream), None) if isinstance(part, End))
            assert "a fault of the program" in end.failure.reason
    assert caught.value.details == "ObjectRef(00ff) is gone"
    assert "the end of its own log says why" in caught.value.sentence


def test_one_that_stops_in_the_midst_of_a_result_holds_nobody_up(make_group):
    with make_group() as group:
        stopping, other = group.workers
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.get(stopping.actor.__ray_call__.remote(lambda _: stop_before_the_arrays()))
        pid, _ = group.call(Program.pid)
        streams = [Stream.begin(stopping, "give", 2)]
        assert eventually(
            lambda: not next_of(streams, [], 0.1) and psutil.Process(pid).status() == psutil.STATUS_STOPPED
        )
        streams.append(Stream.begin(other, "give", 1))
        found = []
        assert eventually(lambda: found.extend(next_of(streams, [], 0.1)) or len(found) == 2)
        assert [stream for stream, _ in found] == streams[1:] * 2
        os.kill(pid, signal.SIGCONT)
        assert [number for _, (number, _, _) in results_of(streams[:1])] == [0, 1]


def stop_before_the_arrays():
    """Stop this process once, when the first part of a result is on its way and its arrays are not."""
    from megarl.cluster.workers import worker_actor

    taken_out = worker_actor.taken_out

    def take_out(result):
        worker_actor.taken_out = taken_out
        rest, arrays = taken_out(result)
        return rest, Stopping(arrays)

    worker_actor.taken_out = take_out


class Stopping(list):
    def __iter__(self):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().__iter__()


def test_a_death_is_told_and_not_its_consequence_which_comes_first(make_group, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "_CONSEQUENCES_S", 60.0)
    heard = []
    with pytest.raises(WorkerGone, match="the process of worker_1 died") as caught, make_group() as group:
        play(group, "lose_a_peer", "die_later", at_first=heard.append)
    (first,) = heard
    assert isinstance(first.error, ConnectionError), "the one that came first, for those that hear of nothing"
    assert "\n" not in caught.value.sentence
    assert caught.value.details.startswith(f"The end of {tmp_path}/logs/worker_1.log:")
    # Nor where nobody said what a consequence looks like.
    with pytest.raises(WorkerGone, match="the process of worker_1 died"), make_group() as group:
        wait(group.begin_each(Program.play, [("lose_a_peer",), ("die_later",)]))


def test_a_death_is_heard_of_while_nothing_is_asked(make_group, monkeypatch):
    monkeypatch.setattr(idle_ranks, "HEARTBEAT_INTERVAL_S", 0.1)
    with pytest.raises(WorkerGone, match="the process of worker_1 died"), make_group() as group:
        check_and_kill(IdleRanks([group]), group.call(Program.pid)[1])


def check_idle(group):
    assert eventually(IdleRanks([group]).raise_if_dead), "nothing was seen while nothing was asked"


WAITS = {
    "nothing is asked": check_idle,
    "all work": lambda group: group.call(Program.sleep),
    "all need each other": lambda group: play(group, "sleep", "sleep"),
}


@pytest.mark.parametrize(
    "meanwhile", ["all work", *(pytest.param(name, marks=pytest.mark.long) for name in WAITS if name != "all work")]
)
def test_one_that_stands_still_is_told_and_ended(make_group, monkeypatch, meanwhile):
    monkeypatch.setattr(idle_ranks, "HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(calls, "HEARTBEAT_INTERVAL_S", 0.2)
    says = r"^worker_1 gave no sign of life for 3 s and was ended: see to its machine .* continues from the last"
    with pytest.raises(WorkerGone, match=says), make_group(silence_s=3) as group:
        stop_the_second_and(WAITS[meanwhile], group, stopped := [])
    assert eventually(partial(has_ended, *stopped))


def stop_the_second_and(wait_for, group, stopped):
    stopped.append(psutil.Process(group.call(Program.pid)[1]))
    stopped[0].suspend()
    wait_for(group)


def check_and_kill(ranks, pid):
    for _ in range(3):
        ranks.raise_if_dead()
    psutil.Process(pid).kill()
    assert eventually(ranks.raise_if_dead)


def test_what_ray_ends_for_memory_is_a_sentence_and_on_one_machine_it_ends_nothing(monkeypatch, tmp_path):
    def get(_call):
        raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(ray, "get", get)
    worker = SimpleNamespace(log=tmp_path / "trainer_3.log", failure=None)
    failure = calls.answer_of(Call(worker, None)).failure
    assert isinstance(failure, WorkerGone)
    assert failure.sentence.startswith("Ray ended trainer_3, because the memory of its machine was nearly full: ")
    raylet = Path(ray._private.worker._global_node.get_logs_dir_path()) / "raylet.out"
    assert "MemoryMonitor disabled" in raylet.read_text()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ray.exceptions.RuntimeEnvSetupError("No space left on device"), "Failed to set up runtime environment"),
        (ray.exceptions.ActorUnschedulableError("it is removed."), "The actor is not schedulable: it is removed"),
        (
            ray.exceptions.ActorPlacementGroupRemoved(),
            "The placement group corresponding to this Actor has been removed",
        ),
    ],
)
def test_a_process_that_ray_cannot_make_is_gone(monkeypatch, tmp_path, error, reason):
    def get(_call):
        raise error

    monkeypatch.setattr(ray, "get", get)
    worker = SimpleNamespace(log=tmp_path / "engine_3.log", failure=None)
    failure = calls.answer_of(Call(worker, None)).failure
    assert isinstance(failure, WorkerGone)
    assert failure is worker.failure
    assert failure.sentence.startswith(f"Ray could not make the process of engine_3 ({reason}): see to its machine")
    assert failure.details.startswith(str(error))


def play(group, *parts, at_first=lambda _failure: None):
    """Each worker its part, in which they need each other."""
    wait_together(group.begin_each(Program.play, [(part,) for part in parts]), ConnectionError, at_first)


def test_those_whom_nobody_needs_any_more_have_to_answer_in_time(make_group):
    message = r"^worker_1 gave no answer for 0\.5 s: see the end of its log, and raise a\.key if it was only slow"
    with pytest.raises(WorkerGone, match=message), make_group() as group:
        wait_for_the_second(group)


def wait_for_the_second(group):
    calls = group.begin_each(Program.play, [("pid",), ("sleep",)])
    wait_together(calls, ConnectionError, last=calls[1:], timeout_s=0.5, key="a.key")


def test_what_the_cluster_does_not_have_is_told_at_once_and_with_the_arithmetic():
    roles = [Role("trainer", 2, cpus=1, gpus=0), Role("engine", 1, cpus=2, gpus=0)]
    says = "2 trainer processes of 1 CPU and 1 engine process of 2 CPUs need 4 CPUs; there are 1: 1 machine of 1 CPU."
    with pytest.raises(UserError, match=f"^{re.escape(says)}"), reserve(roles, ClusterConfig()):
        pass


def test_what_others_have_is_waited_for():
    role, patient = Role("worker", 1, cpus=0.75, gpus=0), ClusterConfig(start_timeout_s=240)
    with ThreadPoolExecutor(1) as threads:
        with reserve([role], patient):
            with (
                pytest.raises(
                    UserError, match=r"^after 0\.1 s others still have what .* 127\.0\.0\.1 has .* Wait for them"
                ),
                reserve([role], ClusterConfig(start_timeout_s=0.1)),
            ):
                pass
            waiting = threads.submit(hold, role, patient)
        assert waiting.result(timeout=250) == 1


def hold(role, cluster):
    with reserve([role], cluster) as seats:
        return len(seats["worker"])


def test_processes_that_do_not_come_up_are_told(tmp_path):
    role = Role("worker", 2, cpus=0.1, gpus=0)
    with reserve([role], ClusterConfig()) as seats:
        group = WorkerGroup(replace(seats["worker"], timeout_s=0), tmp_path / "logs")
        with pytest.raises(
            MachinesUnfit, match=r"after 0 s only \d of 2 worker processes are up: raise cluster\.start"
        ):
            group.nodes()


def test_temporary_files_of_workers_lie_where_they_go_with_the_run():
    """vLLM leaves a file behind for every engine, and what is killed leaves all."""
    cluster = ClusterConfig()
    for role in (trainer_role("trainer", ParallelSizes(), cluster), engine_role(cluster, RolloutConfig())):
        folder = Path(role.environment["TMPDIR"])
        assert folder.is_dir()
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert (folder.parent / "held").is_file()


def test_ray_leaves_the_signals_of_the_process_alone():
    caught = int(Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0], 16)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not caught & 1 << signal.SIGTERM - 1


@pytest.mark.long
def test_processes_that_share_gpus_see_those_of_their_places(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    cluster = ClusterConfig(pools={"all": PoolConfig(["trainer", "engine"], nodes=1, gpus=3, shared=True)})
    asked = {"trainer": (3, 1), "engine": (1, 2), "critic": (1, 1)}
    roles = [
        Role(name, processes, 0.1, gpus, environment={"PYTHONPATH": str(tmp_path)})
        for name, (processes, gpus) in asked.items()
    ]
    visible = {}
    with reserve(roles, cluster) as seats, ExitStack() as stack:
        for role in roles:
            group = stack.enter_context(WorkerGroup(seats[role.name], tmp_path / "logs"))
            group.make("program", "Program", [(rank,) for rank in range(role.processes)])
            visible[role.name] = group.call(Program.environment, "CUDA_VISIBLE_DEVICES")
    first, second, third = visible["trainer"]
    assert visible["engine"] == [f"{first},{second}"]
    # The critic takes no turns.
    assert sorted([first, second, third, *visible["critic"]]) == ["0", "1", "2", "3"]
    assert [int(first), int(second), int(third)] == sorted(map(int, visible["trainer"]))
