"""The batch scripts without a Slurm: which steps they ask for, and when the job goes back into the queue."""

import os
import stat
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "slurm"
STAND_INS = {
    "megarl": "exit 1",
    # A step with a command ends with RUN_CODE, one with Ray when it is told to.
    "srun": """
        echo "$RAY_AUTH_MODE $@" >> steps
        stat --format=%a "$RAY_AUTH_TOKEN_PATH" >> mode 2> /dev/null
        for word in "$@"; do [[ "$word" == node ]] && { trap 'exit 0' USR2; while :; do sleep 0.05; done; }; done
        [[ "$*" != *" run "* ]] || until grep --quiet " node " steps; do sleep 0.02; done
        [[ "$*" != *" run "* || -z "$SAVES" ]] || touch "$MEGARL_PROGRESS_FILE"
        [[ "$*" != *" run "* || -z "$CANCELS" ]] || { kill -TERM "$PPID"; sleep 1; }
        exit "$RUN_CODE" """,
    "scontrol": """
        case "$1 $2" in
          "show hostnames") printf 'n1\\nn2\\n' ;;
          "requeue 7"|"requeue 7_3") echo "$2" > requeued ;;
          "show job")
            # By the ID of an array, as that of its last task is, all tasks.
            [[ "$3" == 7_3 || -z "$SLURM_ARRAY_JOB_ID" ]] || echo "EndTime=2026-11-27T14:05:13"
            echo "   StartTime=2026-11-27T14:05:13 EndTime=${ENDS:-Unknown} Deadline=N/A" ;;
          "show config") echo "KillWait                = 30 sec" ;;
          *) exit 1 ;;
        esac""",
    "hostname": """[[ "$1" == --ip-address ]] && echo "$NAMED" """,
    # As iproute2 shows them.
    "ip": """
        case "$*" in
          "-4 -oneline address show dev ib0") echo '5: ib0    inet 198.51.100.7/24 brd 198.51.100.255' ;;
          "-4 -oneline address show")
            printf '%s\n' '1: lo    inet 127.0.0.1/8' '2: eno1    inet 192.0.2.7/24' '5: ib0    inet 198.51.100.7/24' ;;
          "-4 -oneline route get "*)
            [[ -n "$ROUTED" ]] || { echo "RTNETLINK answers: Network is unreachable" >&2; exit 2; }
            echo "203.0.113.1 via 192.0.2.254 dev eno1 src $ROUTED uid 0 \\    cache " ;;
          *) echo "Device \"${@: -1}\" does not exist." >&2; exit 1 ;;
        esac""",
}


@pytest.fixture
def submit(tmp_path):
    """Runs a script as Slurm does, in a checkout of its own, with stand-ins for what it calls."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "slurm").symlink_to(SCRIPTS)
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)

    def run(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
        given = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_CPUS_ON_NODE": "8",
            "SLURMD_NODENAME": "n1",
            "HEAD_IP": "192.0.2.1",
            "NAMED": "192.0.2.7",
            "ROUTED": "192.0.2.9",
            "RUN_CODE": "0",
            "PATH": f"{programs}:{os.environ['PATH']}",
            **environment,
        }
        return subprocess.run(
            ["bash", f"slurm/{script}", *words], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (2, False), (143, True), (1, True), (137, True)])
def test_a_job_that_is_to_go_on_goes_back_into_the_queue(submit, tmp_path, code, is_requeued):
    done = submit("grpo_deepseek.sh", "loop.steps=5", RUN_CODE=str(code))
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == is_requeued
    assert "No such file" not in done.stderr
    steps = (tmp_path / "steps").read_text()
    assert f"--cpus-per-task=8 --mem=0 --nodes=2 --ntasks=2 {tmp_path}/.venv/bin/python -P -m" in steps
    assert "run 192.0.2.1:6379 --nodes n1 n2 --timeout 300 -- megarl train --config-name grpo_deepseek_v3" in steps
    assert "cluster.address=192.0.2.1:6379 checkpoint.on_signal=true cluster.max_restarts=0 loop.steps=5\n" in steps
    assert all(step.startswith("token ") for step in steps.splitlines())
    assert set((tmp_path / "mode").read_text().split()) == {"600"}
    # Another user of the checkout may have one, too.
    folder = tmp_path / f".slurm-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "7").exists()
    assert list(tmp_path.glob(".slurm*")) == [folder]


@pytest.mark.parametrize(
    ("codes", "is_requeued"),
    [
        ([1, 137, 1], True),
        ([1, 137, 1, 1], False),
        # As in a run of weeks, whose job has a day at a time.
        ([143] * 9 + [1], True),
        ([1, 1, 1, 143, 1], True),
    ],
)
def test_failures_in_a_row_end_a_job_and_ends_of_its_time_do_not(submit, tmp_path, codes, is_requeued):
    for restarts, code in enumerate(codes):
        (tmp_path / "requeued").unlink(missing_ok=True)
        submit("grpo_deepseek.sh", RUN_CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert (tmp_path / "requeued").exists() == is_requeued


def test_the_last_task_of_an_array_takes_no_other_along(submit, tmp_path):
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    submit("grpo_deepseek.sh", RUN_CODE="1", **task)
    assert (tmp_path / "requeued").read_text() == "7_3\n"
    (tmp_path / "requeued").unlink()
    # Cancelled, an hour before its time is over; that of another task has passed.
    ends = datetime.fromtimestamp(int(time.time()) + 3600).isoformat()
    submit("grpo_deepseek.sh", RUN_CODE="143", CANCELS="yes", ENDS=ends, **task)
    assert not (tmp_path / "requeued").exists()


def test_failures_with_a_new_checkpoint_between_them_are_not_in_a_row(submit, tmp_path):
    """As on a cluster of thousands of GPUs, in a job of many days."""
    for saves in ("yes", "yes", "", "yes", "", "", "yes", ""):
        (tmp_path / "requeued").unlink(missing_ok=True)
        submit("grpo_deepseek.sh", RUN_CODE="1", SAVES=saves)
        assert (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("cpus", "asked"), [("8(x2)", 8), ("72(x3),36,72", 36), ("96,128(x15)", 96)])
def test_a_step_asks_each_node_for_what_all_have(submit, tmp_path, cpus, asked):
    submit("sft.sh", SLURM_JOB_CPUS_PER_NODE=cpus)
    assert {f"--cpus-per-task={asked}"} == {
        word for word in (tmp_path / "steps").read_text().split() if word.startswith("--cpus-per-task")
    }


@pytest.mark.parametrize("is_told", [True, False], ids=["Slurm 23.02", "Slurm 22.05"])
@pytest.mark.parametrize(
    ("seconds_left", "codes", "is_requeued"),
    [
        (3600, [143], False),
        (0, [143], True),
        (0, [130], True),
        # No step fits into the job's time.
        (0, [143] * 4, False),
    ],
)
def test_a_job_whose_time_is_over_comes_back_and_one_that_is_cancelled_does_not(
    submit, tmp_path, seconds_left, codes, is_requeued, is_told
):
    end_s = int(time.time()) + seconds_left
    told = {"SLURM_JOB_END_TIME": str(end_s)} if is_told else {"ENDS": datetime.fromtimestamp(end_s).isoformat()}
    for code in codes:
        (tmp_path / "requeued").unlink(missing_ok=True)
        done = submit("grpo_deepseek.sh", RUN_CODE=str(code), CANCELS="yes", **told)
        assert "No such file" not in done.stderr
    assert (tmp_path / "requeued").exists() == is_requeued


@pytest.mark.parametrize(("often", "is_requeued"), [("0", False), ("1", True)])
def test_the_environment_says_how_often_a_job_comes_back(submit, tmp_path, often, is_requeued):
    submit("sft.sh", RUN_CODE="1", MAX_RESTARTS=often)
    assert (tmp_path / "requeued").exists() == is_requeued


def test_a_job_that_has_ended_leaves_no_file(submit, tmp_path):
    for code in (1, 0, 1, 1, 1, 1):
        submit("grpo_deepseek.sh", RUN_CODE=str(code), SAVES="yes" if not code else "")
    assert list((tmp_path / f".slurm-{os.getuid()}").iterdir()) == []


def test_a_container_takes_the_place_of_the_environment(submit, tmp_path):
    (tmp_path / ".venv/bin/megarl").unlink()
    assert "no .venv in" in submit("sft.sh").stderr
    done = submit("sft.sh", "--config-name", "mine", CONTAINER="/images/megarl.sqsh", CONTAINER_MOUNTS="/data:/data")
    assert done.returncode == 0, done.stderr
    # Ray's sockets lie in /tmp, and the second step has a container of its own.
    mounts = f"{tmp_path}:{tmp_path},/tmp:/tmp,/data:/data"
    flags = f"--container-image=/images/megarl.sqsh --container-workdir={tmp_path} --container-mounts={mounts} --nodes="
    steps = (tmp_path / "steps").read_text().splitlines()
    assert len(steps) == 2
    assert all(flags in step for step in steps)


@pytest.mark.parametrize(
    ("script", "does"),
    [
        ("convert.sh", "--mem=0 {root}/.venv/bin/megarl convert --tp 8"),
        ("eval.sh", "-- megarl eval --tp 8 cluster.address=192.0.2.1:6379"),
        ("preflight.sh", "-- megarl doctor --cluster 192.0.2.1:6379 --tp 8"),
        (
            "sft.sh",
            "-- megarl sft cluster.address=192.0.2.1:6379 checkpoint.on_signal=true cluster.max_restarts=0 --tp 8",
        ),
    ],
)
def test_every_script_passes_its_words_on_and_ends_as_the_command(submit, tmp_path, script, does):
    done = submit(script, "--tp", "8", RUN_CODE="2")
    assert (done.returncode, (tmp_path / "requeued").exists()) == (2, False)
    steps = (tmp_path / "steps").read_text()
    assert does.format(root=tmp_path) in steps
    # Set by the script, as `sbatch --export=CONTAINER=IMAGE` would not have it.
    assert all(" --export=ALL " in step for step in steps.splitlines())
    assert (SCRIPTS / script).stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "192.0.2.7"),
        ({"NAMED": "fe80::7%eno1 192.0.2.7"}, "192.0.2.7"),
        ({"NAMED": "127.0.1.1"}, "192.0.2.9"),
        ({"NAMED": "127.0.1.1 192.0.2.8"}, "192.0.2.8"),
        ({"SOCKET_IFNAME": "ib0"}, "198.51.100.7"),
        ({"SOCKET_IFNAME": "ib0", "HEAD_IP": "192.0.2.1"}, "192.0.2.1"),
    ],
)
def test_the_first_node_says_where_the_others_reach_it(submit, tmp_path, environment, address):
    done = submit("sft.sh", **{"HEAD_IP": "", **environment})
    assert done.returncode == 0, done.stderr
    interface = " --interface=ib0" if "SOCKET_IFNAME" in environment else ""
    steps = (tmp_path / "steps").read_text()
    assert f" -m megarl.cluster.ray.slurm node {address}:6379 --head n1{interface}\n" in steps
    assert f"-- megarl sft cluster.address={address}:6379 " in steps


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SLURM_JOB_ID": ""}, "eval.sh: run it with sbatch"),
        # The shell of an salloc.
        ({"SLURMD_NODENAME": "", "SLURM_CPUS_ON_NODE": ""}, "eval.sh: run it with sbatch"),
        # Ray (2.60) refuses it on the first node, and the others would wait for that.
        ({"RAY_PORT": "16379"}, "eval.sh: RAY_PORT=16379 is one of those that Ray's workers listen at, 10001 to 19999"),
        *(
            ({"RAY_PORT": port}, f"eval.sh: RAY_PORT={port} is no port: give a number from 1 to 65535")
            for port in ("foo", "0", "-1", "99999", "08", "6379 ")
        ),
        *(
            ({"MAX_RESTARTS": often}, f"eval.sh: MAX_RESTARTS={often} is no number of restarts: give 0 or more")
            for often in ("foo", "-1", "1.5", "08", "10000000000")
        ),
        ({"HEAD_IP": "127.0.0.1"}, "eval.sh: the other nodes do not reach n1 at '127.0.0.1': give SOCKET_IFNAME"),
        (
            {"HEAD_IP": "", "NAMED": "127.0.1.1", "ROUTED": ""},
            "eval.sh: the other nodes do not reach n1 at '': give SOCKET_IFNAME",
        ),
        (
            {"HEAD_IP": "", "SOCKET_IFNAME": "ib1"},
            "eval.sh: n1 has no interface 'ib1' with an IPv4 address: give SOCKET_IFNAME one that all nodes have,"
            " of eno1 ib0",
        ),
    ],
)
def test_what_keeps_a_job_from_starting_is_one_sentence(submit, tmp_path, environment, says):
    done = submit("eval.sh", **environment)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(says)
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name != "cluster.sh"))
def test_a_job_from_another_folder_is_told_where_to_submit_it(tmp_path, script):
    command = ["bash", str(SCRIPTS / script)]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    said = f"{script}: {tmp_path} is no checkout, it has no slurm/cluster.sh: submit from the checkout\n"
    assert (done.returncode, done.stderr) == (2, said)
