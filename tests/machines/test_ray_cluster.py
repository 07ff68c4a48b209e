"""Runs in a Ray cluster that somebody started, `ray start` on each of two machines, and what is said of a bad one."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from equal_runs import without_timings
from machines import ADDRESSES, PATH, Machines, eventually, missing, network

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
HEAD = f"{ADDRESSES['n1']}:6379"
STEPS = 4
RUN_S = 400.0
COUNT = f"import ray; ray.init('{HEAD}'); print(); print(sum(each['Alive'] for each in ray.nodes()))"
START = ("ray", "start", "--disable-usage-stats", "--num-cpus=3")


@pytest.fixture(scope="module")
def machines():
    if reason := missing():
        pytest.skip(reason)
    # Short, because the path of a Unix socket ends after 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="megarl-nodes-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("5" * 64)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{PATH}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "OMP_NUM_THREADS": "1",
    }
    try:
        with network(folder, environment) as made:
            for name in ADDRESSES:
                made.start(name, "sleep", "infinity")
            made.on("n1", *START, "--head", f"--node-ip-address={ADDRESSES['n1']}", "--include-dashboard=false")
            yield made
    finally:
        shutil.rmtree(folder)


def join(machines: Machines) -> None:
    machines.on("n2", *START, f"--address={HEAD}", f"--node-ip-address={ADDRESSES['n2']}")


@pytest.fixture(scope="module")
def command(machines):
    """Makes a command: the quickstart with a rank on each machine and an engine of which each has a half."""
    model = write_tiny_model("qwen3_moe", machines.folder / "model")
    files = write_arithmetic(machines.folder / "data", held_out=16)
    return lambda name, *overrides: [
        *("megarl", "train", "--config-name", "quickstart", f"output_dir={machines.folder / name}"),
        *(f"model.path={model}", f"data.train_files=[{files.train}]", f"data.eval_files=[{files.eval}]"),
        f"reward.function={ROOT / 'tests/megarl/digits.py'}:count_digits",
        *("rollout.engine_args.nnodes=2", "rollout.engine_args.tensor_parallel_size=2"),
        *(f"cluster.address={HEAD}", "cluster.nodes=2", "cluster.trainer_cpus=2"),
        # Both machines have the cores of this one, and slow each other down.
        "cluster.check_nodes=false",
        *(f"loop.steps={STEPS}", "loop.prompts_per_step=4", "loop.samples_per_prompt=4", "loop.eval_every=0"),
        *("checkpoint.every=1", *overrides),
    ]


def steps_of(folder: Path) -> list[dict]:
    """The metrics of each step, in lines that are written whole."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    written = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in written if line["step"] > 0]


@pytest.fixture(scope="module")
def undisturbed(machines, command):
    """The steps of a run that began before the second machine was there, and has nothing in its way then."""
    log = machines.folder / "whole.log"
    run = machines.begin("n1", log, *command("whole", "refit.transport=tcp"))
    wait_until(lambda: "waiting for 2 machines, of which there are 1" in log.read_text(), "the wait", run, log)
    join(machines)
    assert run.wait(RUN_S) == 0, log.read_text()[-3000:]
    return steps_of(machines.folder / "whole")


def wait_until(holds, what, run, log):
    eventually(lambda: holds() or run.poll() is not None, what, RUN_S)
    assert run.poll() is None, log.read_text()[-3000:]


def test_a_run_begins_when_all_machines_are_there(undisturbed):
    assert len(undisturbed) == STEPS
    assert all(line["refit/direct"] == 1 for line in undisturbed)


def test_a_run_whose_machine_is_unplugged_goes_on_when_it_is_back(machines, command, undisturbed):
    log, output = machines.folder / "unplugged.log", machines.folder / "unplugged"
    # Another transport, which changes no number.
    run = machines.begin("n1", log, *command("unplugged", "refit.transport=rdma"))
    wait_until(lambda: len(steps_of(output)) >= 2, "step 2", run, log)
    machines.unplug("n2")
    wait_until(lambda: "(restart 1 of 10)" in log.read_text(), "a restart", run, log)
    eventually(lambda: machines.on("n1", sys.executable, "-c", COUNT).endswith("\n1\n"), "a machine less", RUN_S)
    machines.start("n2", "sleep", "infinity")
    join(machines)
    assert run.wait(RUN_S) == 0, log.read_text()[-3000:]
    assert "10.77.0.1   trainer 0, engine 0\n10.77.0.2   trainer 1, engine 1\n" in log.read_text()
    assert list(map(without_timings, steps_of(output))) == list(map(without_timings, undisturbed))


def test_trainer_and_engine_take_turns_on_both_machines(machines, command, undisturbed):
    log = machines.folder / "turns.log"
    pool = "cluster.pools.all={roles:[trainer,engine],nodes:2,shared:true}"
    assert machines.begin("n1", log, *command("turns", pool)).wait(RUN_S) == 0, log.read_text()[-3000:]
    assert "10.77.0.2   trainer 1 and engine 1 in turns\n" in log.read_text()
    steps = steps_of(machines.folder / "turns")
    assert min(line["memory/engines"] for line in steps) > 0
    own = ("memory/", "refit/")
    apart = [without_timings(line, *own) for line in undisturbed]
    in_turns = [without_timings(line, *own) for line in steps]
    assert in_turns == apart


def test_a_machine_that_never_comes_is_told_apart_from_those_that_are_there(machines, command, undisturbed):
    said = machines.on("n1", *command("absent", "cluster.nodes=3", "cluster.start_timeout_s=3"))
    assert "after 3 s the Ray cluster has 2 of cluster.nodes=3 machines, 10.77.0.1, 10.77.0.2: start" in said


def test_an_address_where_no_cluster_is_is_said_at_once(machines, command):
    absent = f"{ADDRESSES['n2']}:6378"
    said = machines.on("n1", *command("nobody", f"cluster.address={absent}"))
    assert said.splitlines()[-1].startswith(f"megarl: nothing listens at cluster.address={absent}: see that `ray ")
    said = machines.on("n1", *command("nobody", "cluster.address=head"))
    assert said.splitlines()[-1].startswith("megarl: cluster.address=head is no address: give host:port, or auto")


def test_a_cluster_with_another_secret_is_said(machines, command):
    other = machines.folder / "other"
    other.write_text("6" * 64)
    said = machines.on("n1", "env", f"RAY_AUTH_TOKEN_PATH={other}", *command("stranger"))
    assert said.splitlines()[-1].startswith(f"megarl: the Ray cluster at {HEAD} takes no connection from here: set ")
