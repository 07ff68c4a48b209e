"""Tasks of a job of Slurm: a Ray node on each machine, and on the first the command that the job is for.

    python -m megarl.cluster.ray.slurm node 10.0.0.1:6379 --head n1
    python -m megarl.cluster.ray.slurm run 10.0.0.1:6379 --nodes n1 n2 --timeout 300 -- megarl train ...

`slurm/cluster.sh` starts them. Each runs its program in a session of its own, where no signal of Slurm reaches it,
passes on what it is to hear, and takes it along when it ends, whatever ends it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from converters.errors import UserError
from megarl.cluster.ray.network_environment import address_of
from megarl.process.errors import MachinesUnfit, exit_code_of
from megarl.process.logs import last_lines
from megarl.process.own_programs import with_programs_of
from megarl.process.raised_limits import raise_limits
from megarl.process.scratch import scratch_folder
from megarl.rollout import ENGINES
from megarl.sandbox.process_tree import die_with

END_NOW = signal.SIGUSR2
"""Sent by the batch script, which Slurm's own termination signals also reach."""
SLURM_NODE = "slurm-node"
"""Label of a Ray node with Slurm's name of its machine."""
# Slurm sends SIGTERM some time before it ends a preempted job, and SIGUSR1 if the script asks for it.
_NODE_HEARS: Mapping[int, signal.Signals | None] = {
    signal.SIGTERM: None,
    signal.SIGUSR1: None,
    END_NOW: signal.SIGTERM,
}
_COMMAND_HEARS: Mapping[int, signal.Signals | None] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,
    END_NOW: signal.SIGINT,
}
"""Slurm's signal -> the signal that the program gets."""
# No run needs the autoscaler and the dashboard, and they listen on ports.
_HEAD_ALONE = ("--include-dashboard=false", "--no-monitor")
_CACHES = {
    # vLLM and its DeepGEMM, torch, numba, cuDNN's frontend, cuTile.
    "XDG_CACHE_HOME": "cache",
    "TRITON_CACHE_DIR": "triton",
    # FlashInfer creates its folder on import, and vLLM imports it on every GPU.
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "HUMMING_CACHE_DIR": "humming/cache",
    "HUMMING_TMP_DIR": "humming/tmp",
    "QUACK_CACHE_DIR": "quack",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    # CUDA's driver.
    "CUDA_CACHE_PATH": "nv",
    **{variable: folder for kind in ENGINES.values() for variable, folder in kind.kernel_folders.items()},
}
"""Variable -> folder for compiled kernels. By default they are in the home folder, where nodes that share it over NFS
disturb each other, and which may be read-only in a container.
"""
_RAY_ENDS_S = 15.0
_POLL_S = 0.5
_CONNECT_S = 2.0


class Supervised:
    """A program in a session of its own. Each incoming signal is forwarded once, translated by `hears`."""

    def __init__(
        self,
        command: Sequence[str],
        hears: Mapping[int, signal.Signals | None],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
    ) -> None:
        self._told: set[signal.Signals] = set()
        self._hears = hears
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(_begin, os.getpid()),
        )
        for number in hears:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        told = self._hears[number]
        if told is not None and told not in self._told:
            self._told.add(told)
            with suppress(ProcessLookupError):
                self._process.send_signal(told)

    @property
    def was_told(self) -> bool:
        """Whether a signal was forwarded to it."""
        return bool(self._told)

    def wait(self, end_s: float | None = None) -> int:
        """Wait for its end, and kill it `end_s` after a signal was forwarded; return the exit code as a shell does."""
        told_s: float | None = None
        while self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
            if self._told and told_s is None:
                told_s = time.monotonic()
            if end_s is not None and told_s is not None and time.monotonic() > told_s + end_s:
                self._process.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.returncode
        return code if code >= 0 else 128 - code


def _begin(parent: int) -> None:
    """Set up the program's process: it ends with its parent, and gets SIGINT even if the batch script ignored it."""
    die_with(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def serve(address: str, head: str, interface: str | None) -> int:
    """Run a node of the Ray cluster at `address`, whose first machine is `head`, until told to end.

    The other machines listen on `interface`; None selects that of their route to the first.
    """
    # An early notice must not end this process.
    for number in _NODE_HEARS:
        signal.signal(number, lambda *_: None)
    from megarl.cluster.ray.runtime import LONGEST_SOCKET

    # Inherited by Ray's own processes on the node, and so by all ranks and engines.
    raise_limits()
    name = os.environ["SLURMD_NODENAME"]
    with scratch_folder(LONGEST_SOCKET) as folder:
        log, temporary = folder / "start.log", folder / "t"
        temporary.mkdir()
        with log.open("wb") as output:
            start = _ray_start(address, name, head, interface, folder / "r")
            node = Supervised(start, _NODE_HEARS, _environment_of_node(temporary), output)
            code = node.wait(_RAY_ENDS_S)
        if node.was_told:
            return 0
        print(f"{name}: Ray ended by itself with exit code {code}:\n{last_lines(log)}", file=sys.stderr, flush=True)
        return code or 1


def _ray_start(address: str, name: str, head: str, interface: str | None, folder: Path) -> list[str]:
    host, _, port = address.rpartition(":")
    where = [f"--address={address}"]
    if name == head:
        where = ["--head", f"--node-ip-address={host}", f"--port={port}", *_HEAD_ALONE]
    elif interface is not None:
        where.append(f"--node-ip-address={address_of(interface)}")
    return [
        *("ray", "start", "--block", *where, "--disable-usage-stats", "--include-log-monitor=false"),
        *(f"--temp-dir={folder}", f"--labels={SLURM_NODE}={name}", f"--num-cpus={os.environ['SLURM_CPUS_ON_NODE']}"),
    ]


def _environment_of_node(temporary: Path) -> dict[str, str]:
    return {name: str(temporary / folder) for name, folder in _CACHES.items()} | _environment(temporary)


def _environment(temporary: Path) -> dict[str, str]:
    return {
        **os.environ,
        # A container has its own PATH, without this Python.
        "PATH": with_programs_of(sys.executable, os.environ),
        "TMPDIR": str(temporary),
        # The workers are the job.
        "RAY_worker_niceness": "0",
        # The first driver only checks which nodes have joined; Ray would prestart a worker per CPU of the first node
        # for it.
        "RAY_prestart_worker_first_driver": "0",
        # Nothing has to be moved off an ending node, as the whole job ends.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def run(address: str, nodes: Sequence[str], timeout_s: float, command: Sequence[str]) -> int:
    """Run a command once all nodes have joined; return its exit code. Raises UserError if they do not join."""
    wait_for_nodes(address, nodes, timeout_s)
    with scratch_folder() as folder:
        return Supervised(command, _COMMAND_HEARS, _environment(folder)).wait()


def wait_for_nodes(address: str, nodes: Sequence[str], timeout_s: float) -> None:
    """Wait until each of these machines has a Ray node that is up. Raises UserError, naming those that have none."""
    import ray

    from megarl.cluster.ray.joining import join, listens

    deadline = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    absent = list(nodes)
    while not listens(host, int(port), _CONNECT_S):
        _check_time(deadline, timeout_s, absent, address)
    join(address)
    try:
        while absent := [name for name in nodes if name not in _joined(ray.nodes())]:
            _check_time(deadline, timeout_s, absent, address)
    finally:
        ray.shutdown()


def _joined(ray_nodes: Sequence[Mapping[str, object]]) -> set[str]:
    labels = [node["Labels"] for node in ray_nodes if node["Alive"]]
    return {each[SLURM_NODE] for each in labels if isinstance(each, Mapping) and SLURM_NODE in each}


def _serve_and_tell(address: str, head: str, interface: str | None) -> int:
    """Do as `serve`; after a failure, notify the task that waits for this node."""
    code = 1
    try:
        code = serve(address, head, interface)
    finally:
        if code and (file := _end_of(os.environ["SLURMD_NODENAME"])) is not None:
            with suppress(OSError):
                file.touch()
    return code


def _end_of(name: str) -> Path | None:
    """The file that marks that a machine's Ray node has ended by itself, in the job's folder, which all nodes share.

    Its name differs after the job was requeued.
    """
    token, restarts = os.environ.get("RAY_AUTH_TOKEN_PATH"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return Path(token).with_name(f"ended-{restarts}-{name}") if token else None


def _check_time(deadline: float, timeout_s: float, absent: Sequence[str], address: str) -> None:
    ended = [name for name in absent if (file := _end_of(name)) is not None and file.exists()]
    if ended:
        raise MachinesUnfit(
            f"Ray ended by itself on {', '.join(ended)} before all nodes had joined: see what it said, or leave the"
            f" machine out (sbatch --exclude={','.join(ended)})"
        )
    if time.monotonic() > deadline:
        raise MachinesUnfit(
            f"after {timeout_s:g} s {', '.join(absent)} had not joined the Ray cluster at {address}: see whether there"
            f" is a way to that port from there, leave the machine out (sbatch --exclude={','.join(absent)}), or give"
            " more time (START_TIMEOUT_S)"
        )
    time.sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.cluster.ray.slurm", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    node = tasks.add_parser("node", help="be a Ray node until SIGUSR2")
    node.add_argument("address")
    node.add_argument("--head", required=True)
    node.add_argument("--interface")
    command = tasks.add_parser("run", help="run a command when all nodes are up")
    command.add_argument("address")
    command.add_argument("--nodes", nargs="+", required=True)
    command.add_argument("--timeout", type=float, required=True)
    command.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        if options.task == "node":
            return _serve_and_tell(options.address, options.head, options.interface)
        return run(options.address, options.nodes, options.timeout, options.command)
    except UserError as error:
        print(f"megarl: {error.sentence}", file=sys.stderr, flush=True)
        return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
