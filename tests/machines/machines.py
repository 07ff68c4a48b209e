"""Machines on one host: each has a network, a host name, processes and memory of its own, and one folder is of all.

They are namespaces of the kernel below one namespace that has the network between them, so that nothing of it can be
reached from outside, two of them do not meet, and all of it is gone with the process that started it.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
"""Name and address of each machine."""
CONTROL = "10.77.0.254"
"""Address of the namespace that has the network."""
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = ("unshare", "nsenter", "ip")
_UP_S = 200.0
_RUN_S = 400.0
"""Longest time of a whole run on a machine: on loaded cores it is minutes, where it is half a minute on idle ones."""
# Its first process adopts those whose parent ended, and all others end with it.
_MACHINE = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /mnt
mount -t tmpfs tmpfs /tmp
mkdir -p "$1"
mount --move /mnt "$1"
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
read -r _
shift 2
"$@" &
wait
"""
_NETWORK = """
set -e
hostname control
mount --bind "$HOSTS" /etc/hosts
ip link set lo up
ip link add switch type bridge
ip addr add "$ADDRESS/24" dev switch
ip link set switch up
echo ready
read -r _ || true
"""


def missing(*programs: str) -> str | None:
    """Why no machines, with these programs on them, can be made here; None where they can."""
    if os.geteuid() != 0:
        return "namespaces of the kernel need root"
    absent = [name for name in (*_PROGRAMS, *programs) if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --yes slurm-wlm munge iproute2 util-linux"
    if subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True
    ).returncode:
        return "the kernel gives this process no namespaces of its own"
    return None


class Machines:
    """Machines n1 and n2; `folder` is on a file system that both see, all else is their own."""

    def __init__(self, folder: Path, network: int, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.log = folder / "outside.log"
        self._network = network
        """Process that the network lives with."""
        self._machines: dict[str, subprocess.Popen] = {}
        self._environment = {"PATH": PATH, "HOME": str(folder), "LANG": "C.UTF-8", **environment}

    def start(self, name: str, *program: str) -> None:
        """Start a machine and, when its network is there, a program on it."""
        machine = subprocess.Popen(
            self._inside(
                *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"),
                *("bash", "-c", _MACHINE, "machine", str(self.folder), name, *program),
            ),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )
        self._machines[name] = machine
        eventually(lambda: self._first(name) is not None, f"the first process of {name}")
        first = self._first(name)
        assert first is not None
        self._in_network(self._network, f"link add {name} type veth peer name eth0 netns {first.pid}")
        self._in_network(self._network, f"link set {name} master switch up")
        self._in_network(first.pid, "link set lo up")
        self._in_network(first.pid, f"addr add {ADDRESSES[name]}/24 dev eth0")
        self._in_network(first.pid, "link set eth0 up")
        assert machine.stdin is not None
        machine.stdin.write(b"the network is there\n")
        machine.stdin.flush()

    def unplug(self, name: str) -> None:
        """End all processes of a machine, and its network, at once."""
        first = self._first(name)
        assert first is not None
        # The kernel would take it away some time after the last process.
        self._in_network(self._network, f"link delete {name}")
        first.kill()
        self._machines.pop(name).wait()

    def processes(self, name: str) -> list[str]:
        """Command lines of the processes that live on a machine, but for its first."""
        first = self._first(name)
        assert first is not None
        found = []
        for process in first.children(recursive=True):
            try:
                line, is_dead = " ".join(process.cmdline()), process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                continue
            if not is_dead:
                found.append(line)
        return found

    def files(self, name: str, folder: str) -> list[str]:
        """Names in a folder that a machine has for itself."""
        first = self._first(name)
        assert first is not None
        return sorted(os.listdir(f"/proc/{first.pid}/root{folder}"))

    def listeners(self, name: str) -> set[tuple[str, str]]:
        """Address and name of each program on a machine that listens somewhere."""
        shown = self.on(name, "ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header")
        found = re.findall(r"^\S+ +\S+ +\S+ +(\S+):\d+ .*?users:\(\(\"([^\"]*)", shown, flags=re.MULTILINE)
        return {(host.removeprefix("[::ffff:").removesuffix("]"), program) for host, program in found}

    def on(self, name: str, *command: str) -> str:
        """Run a command on a machine; its output, errors included."""
        done = subprocess.run(
            self.command_on(name, *command),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
        )
        return done.stdout

    def begin(self, name: str, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine, with its output in a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command_on(name, *command),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def command_on(self, name: str, *command: str) -> list[str]:
        """The command line that runs a command on a machine."""
        first = self._first(name)
        assert first is not None
        return ["nsenter", f"--target={first.pid}", "--net", "--mount", "--pid", "--uts", "--", *command]

    def begin_outside(self, *command: str) -> None:
        """Start a command where the network is, on none of the machines."""
        subprocess.Popen(
            self._inside(*command),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )

    def outside(self, *command: str) -> str:
        """Run a command where the network is; its output."""
        done = subprocess.run(
            self._inside(*command), env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def _first(self, name: str) -> psutil.Process | None:
        """The process with which a machine begins and ends: the child of unshare, below nsenter."""
        children = psutil.Process(self._machines[name].pid).children(recursive=True)
        return next((each for each in children if each.name() == "bash"), None)

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self._network}", "--net", "--mount", "--pid", "--uts", "--", *command]

    def _in_network(self, process: int, command: str) -> None:
        subprocess.run(
            ["nsenter", f"--target={process}", "--net", "ip", *command.split()], check=True, env=self._environment
        )


@contextmanager
def network(folder: Path, environment: Mapping[str, str]) -> Iterator[Machines]:
    """A network for machines that are started later. All processes end with the context, or with this process."""
    lines = [f"{address} {name}" for name, address in {**ADDRESSES, "control": CONTROL}.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    # Reads to the end of this process, and takes everything along.
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "bash", "-c", _NETWORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": PATH, "HOSTS": str(folder / "hosts"), "ADDRESS": CONTROL},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        (first,) = psutil.Process(process.pid).children()
        yield Machines(folder, first.pid, environment)
    finally:
        process.stdin.close()
        process.wait(timeout=120)


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = _UP_S) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s:g} s: {what}"
        time.sleep(0.2)
