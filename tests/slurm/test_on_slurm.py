"""The batch script on a real Slurm of two nodes: a run finishes, is cancelled, saves, survives a dead node."""

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest
from equal_runs import without_timings
from machines import ADDRESSES, eventually
from slurm_cluster import KILL_WAIT_S, SlurmCluster, missing, slurm_cluster

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OF_JOBS = ROOT / f".slurm-{os.getuid()}"
STEPS = 6
JOB_S = 300.0
REQUEUE_S = 10
"""Seconds that Slurm itself lets pass, at the least, before what was requeued may begin."""
SLURM_AND_RAY = ("srun", "slurmd", "slurmstepd", "gcs_server", "raylet", "ray", "megarl")
STRANGER = f"import ray; ray.init('{ADDRESSES['n1']}:6379'); print(ray.nodes())"


@pytest.fixture(scope="module")
def slurm():
    if reason := missing():
        pytest.skip(reason)
    # Short, because the path of a Unix socket ends after 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-"))
    try:
        with slurm_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def empty_queue(slurm):
    """A test that fails leaves its job to nobody."""
    yield
    slurm.run("scancel", "--user=root")
    eventually(lambda: not slurm.run("squeue", "--noheader"), "an empty queue")


@pytest.fixture(scope="module")
def overrides(slurm):
    """Makes arguments: the recipe of the quickstart, a rank on each of two nodes, an engine beside one of them."""
    model = write_tiny_model("qwen3_moe", slurm.folder / "model")
    files = write_arithmetic(slurm.folder / "data", held_out=16)
    return lambda name: [
        *("--config-name", "quickstart"),
        f"output_dir={slurm.folder / name}",
        f"model.path={model}",
        f"data.train_files=[{files.train}]",
        f"data.eval_files=[{files.eval}]",
        f"reward.function={ROOT / 'tests/megarl/digits.py'}:count_digits",
        *("rollout.engine=transformers", "rollout.engine_args={}"),
        *("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "loop.eval_every=0"),
        # Both nodes have the cores of this machine, and slow each other down.
        *("cluster.trainer_cpus=2", "cluster.check_nodes=false", "checkpoint.every=1"),
    ]


class Job:
    """A job that was submitted, and what it wrote."""

    def __init__(
        self, slurm: SlurmCluster, name: str, *words: str, script: str = "grpo_deepseek.sh", minutes: int = 60
    ) -> None:
        self.slurm, self.output, self.log = slurm, slurm.folder / name, slurm.folder / f"{name}.log"
        self.id = slurm.run(
            *("sbatch", "--parsable", "--nodes=2", f"--time={minutes}", f"--chdir={ROOT}", f"--output={self.log}"),
            *(str(ROOT / "slurm" / script), *words),
        ).strip()

    @property
    def state(self) -> str:
        return self.field("JobState")

    def field(self, name: str) -> str:
        shown = self.slurm.run("scontrol", "show", "job", self.id)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    def steps(self) -> list[dict]:
        """The metrics of each step, in lines that are written whole."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        written = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in written if line["step"] > 0]

    def wait(self, *states: str) -> None:
        """Wait for a state; a failure shows the log of the job."""
        self.until(lambda: self.state in states, f"job in state {' or '.join(states)}")

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: len(self.steps()) >= step or self.state == "FAILED", f"step {step}")
        assert len(self.steps()) >= step, self.said()

    def wait_for_restart(self) -> None:
        """Wait until the job is back in the queue, and let it begin soon: Slurm would wait two minutes."""
        self.until(lambda: (self.state, self.field("Restarts")) == ("PENDING", "1"), "a restart")
        # A node refuses a launch of the second in which it was told to end the job, and the job fails or is held.
        self.slurm.run("scontrol", "update", f"JobId={self.id}", f"StartTime=now+{REQUEUE_S}")

    def until(self, holds, what: str) -> None:
        try:
            eventually(holds, what, JOB_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.said()}") from error

    def said(self) -> str:
        """The ends of what the job and Slurm's controller wrote."""
        logs = (self.log, self.slurm.folder / "slurmctld.log")
        return "\n".join(f"{log.name} ends:\n{log.read_text()[-3000:]}" for log in logs)


def check_that_nothing_is_left(slurm, job):
    eventually(lambda: job.state not in ("COMPLETING", "RUNNING"), "the end of the job")
    for node in ADDRESSES:
        eventually(lambda node=node: slurm.processes(node) == [], f"no process on {node}")
        assert slurm.nodes.files(node, "/dev/shm") == []
        assert slurm.nodes.files(node, "/tmp") == [slurm.folder.name]
    assert not (OF_JOBS / job.id).exists()


@pytest.fixture(scope="module")
def undisturbed(slurm, overrides):
    """A job of the script that ran to its end."""
    job = Job(slurm, "whole", *overrides("whole"), f"loop.steps={STEPS}")
    job.wait("COMPLETED", "FAILED")
    return job


def test_a_run_over_two_nodes_finishes(undisturbed, slurm):
    assert undisturbed.state == "COMPLETED", undisturbed.said()
    assert "10.77.0.1   trainer 0, engine 0\n10.77.0.2   trainer 1\n" in undisturbed.log.read_text()
    assert len(undisturbed.steps()) == STEPS
    assert all(line["refit/direct"] == 1 for line in undisturbed.steps())
    assert (undisturbed.output / "huggingface/model.safetensors").exists()
    check_that_nothing_is_left(slurm, undisturbed)


def test_a_job_that_is_cancelled_leaves_nothing(slurm, overrides):
    job = Job(slurm, "cancelled", *overrides("cancelled"), "loop.steps=100000")
    job.wait_for_step(1)
    assert any("raylet" in line for line in slurm.processes("n2"))
    check_that_strangers_get_no_connection(slurm, job)
    slurm.run("scancel", job.id)
    began = time.monotonic()
    check_that_nothing_is_left(slurm, job)
    assert time.monotonic() - began < KILL_WAIT_S
    assert job.state == "CANCELLED"
    assert job.field("Restarts") == "0"


def check_that_strangers_get_no_connection(slurm, job):
    """Who is on the network and has no secret is refused by Ray; nothing else is open to all."""
    assert stat.S_IMODE((OF_JOBS / job.id / "token").stat().st_mode) == 0o600
    refused = slurm.nodes.on("n2", "env", "RAY_AUTH_MODE=disabled", sys.executable, "-c", STRANGER)
    assert "AuthenticationError" in refused, refused
    for node, address in ADDRESSES.items():
        everywhere = {program for host, program in slurm.nodes.listeners(node) if host not in (address, "127.0.0.1")}
        # Slurm's own, and Ray's, which ask for the secret and cannot listen on one interface: in the controller, too.
        assert {name for name in everywhere if name not in SLURM_AND_RAY and not name.startswith("ray::")} == set()


@pytest.mark.parametrize("why", ["it is to be preempted", "its time is too short for another step"])
def test_a_job_saves_and_goes_on_where(slurm, overrides, why):
    name, is_preempted = why.replace(" ", "_"), "preempted" in why
    # Far more than it reaches before its end; without it, only the last step is saved.
    words = (*overrides(name), "loop.steps=100000", "checkpoint.every=0")
    job = Job(slurm, name, *words, minutes=60 if is_preempted else 2)
    if is_preempted:
        job.wait_for_step(2)
        # Sent to the steps and not to the batch script, as Slurm's own notice is.
        slurm.run("scancel", "--signal=TERM", job.id)
    job.wait_for_restart()
    assert ("the job's time is too short for another step" in job.log.read_text()) != is_preempted
    saved = len(job.steps())
    assert (job.output / f"checkpoints/iter_{saved:07d}").is_dir()
    if is_preempted:
        job.wait_for_step(saved + 1)
    slurm.run("scancel", job.id)
    check_that_nothing_is_left(slurm, job)


def test_a_run_whose_node_dies_goes_on_to_the_same_numbers(slurm, overrides, undisturbed):
    job = Job(slurm, "unplugged", *overrides("unplugged"), f"loop.steps={STEPS}")
    job.wait_for_step(2)
    slurm.nodes.unplug("n2")
    done = len(job.steps())
    assert done < STEPS
    slurm.start_node("n2")
    job.wait_for_restart()
    job.wait("COMPLETED", "FAILED")
    assert job.state == "COMPLETED", job.said()
    assert list(map(without_timings, job.steps())) == list(map(without_timings, undisturbed.steps()))
    check_that_nothing_is_left(slurm, job)


def test_a_node_that_does_not_see_a_folder_is_named_before_a_run(slurm):
    # A table breaks its lines where the figures of this machine leave no room.
    job = Job(slurm, "preflight", "--json", "--folders", str(slurm.folder), "/tmp", script="preflight.sh")
    job.wait("COMPLETED", "FAILED")
    assert job.state == "FAILED"
    said = job.log.read_text()
    assert "it does not see what n1 writes into /tmp" in said
    assert f"writes into {slurm.folder}" not in said
    check_that_nothing_is_left(slurm, job)


def test_the_nodes_of_a_job_that_runs_can_be_looked_at_from_outside(slurm, overrides):
    job = Job(slurm, "looked_at", *overrides("looked_at"), "loop.steps=100000")
    job.wait_for_step(1)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    command = "srun --jobid=JOBID" + page.partition("srun --jobid=JOBID")[2].partition("\n\n")[0]
    said = slurm.run("bash", "-c", f"cd {ROOT}; {command.replace('JOBID', job.id)} 2>&1; true")
    assert ADDRESSES["n1"] in said
    assert ADDRESSES["n2"] in said
    assert "in use" in said
