"""The batch script of Slurm at the end of its time: the run is told, waited for, and goes back into the queue."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "grpo_deepseek.sh"
STAND_INS = {
    # A run that finishes its step; with `exit CODE` among its arguments it ends by itself.
    "megarl": """
        echo "$@" > arguments
        for word in "$@"; do [[ "$word" == exit=* ]] && exit "${word#exit=}"; done
        trap 'sleep 0.3; echo saved > saved; exit 143' TERM
        touch started
        while :; do sleep 0.05; done""",
    "srun": "exec sleep 60",
    "python": "cat > /dev/null; echo 1",
    "scontrol": 'echo "$@" > requeued',
}


@pytest.fixture
def submit(tmp_path):
    """Starts the script as Slurm does, in a folder of its own, with stand-ins for what it calls."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURMD_NODENAME": "n1",
        "HEAD_IP": "192.0.2.1",
        "PATH": os.environ["PATH"],
    }
    started = []

    def start(*words: str) -> subprocess.Popen:
        started.append(
            subprocess.Popen(
                ["bash", str(SCRIPT), *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_run_out_of_time_is_saved_and_goes_back_into_the_queue(submit, tmp_path):
    job = submit("loop.steps=5")
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 143
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    words = (tmp_path / "arguments").read_text().split()
    assert {"checkpoint.on_signal=true", "loop.steps=5", "cluster.address=192.0.2.1:6379"} <= set(words)


@pytest.mark.parametrize("code", [0, 2])
def test_a_run_that_ends_by_itself_gives_its_exit_code(submit, tmp_path, code):
    job = submit(f"exit={code}")
    job.communicate(timeout=60)
    assert job.returncode == code
    assert not (tmp_path / "requeued").exists()
