"""A real Slurm of two nodes on one machine: each node has a network, a host name, processes and memory of its own.

The nodes are namespaces of the kernel below one namespace that has the network between them, so that nothing of it can
be reached from outside, two of them do not meet, and all of it is gone with the process that started it.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
CONTROLLER = "10.77.0.254"
ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
"""Name and address of each node."""
CPUS = 3
"""CPUs that Slurm has of each node, whatever this machine has."""
GPUS = 8
"""GPUs that Slurm believes a node to have."""
KILL_WAIT_S = 20
_UP_S = 60.0
_CONFIGURATION = f"""
ClusterName=megarl
SlurmctldHost=control({CONTROLLER})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={{folder}}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={KILL_WAIT_S}
SlurmdTimeout=10
SlurmctldDebug=info
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd-%n.pid
SlurmctldLogFile={{folder}}/slurmctld.log
SlurmdLogFile={{folder}}/slurmd-%n.log
GresTypes=gpu
{{nodes}}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# Its first process adopts those whose parent ended, and all others end with it.
_NODE = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /mnt
mount -t tmpfs tmpfs /tmp
mkdir -p "$1"
mount --move /mnt "$1"
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
read -r _
slurmd -D -N "$2" -f "$1/slurm.conf" &
wait
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    if os.geteuid() != 0:
        return "a real Slurm needs root, to make namespaces of the kernel"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --yes slurm-wlm munge iproute2 util-linux"
    if subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True
    ).returncode:
        return "the kernel gives this process no namespaces of its own"
    return None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """Nodes n1 and n2 of a Slurm that runs; `folder` is on a file system that both see, all else is their own."""

    def __init__(self, folder: Path, network: int) -> None:
        self.folder = folder
        self.log = folder / "outside.log"
        self._network = network
        """Process that the network lives with."""
        self._nodes: dict[str, subprocess.Popen] = {}
        self._environment = {
            "PATH": _PATH,
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(self, *command: str) -> str:
        """Run a command of Slurm where the controller is; its output."""
        done = subprocess.run(
            self._inside(*command), env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def start_controller(self) -> None:
        """Start what all nodes ask."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._begin(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        eventually((self.folder / "munge.socket").exists, "munged")
        self._begin("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def start_node(self, name: str) -> None:
        """Start a node, and wait until it can take jobs."""
        node = subprocess.Popen(
            self._inside(
                *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"),
                *("bash", "-c", _NODE, "node", str(self.folder), name),
            ),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )
        self._nodes[name] = node
        eventually(lambda: self._first(name) is not None, f"the first process of {name}")
        first = self._first(name)
        assert first is not None
        self._in_network(self._network, f"link add {name} type veth peer name eth0 netns {first.pid}")
        self._in_network(self._network, f"link set {name} master switch up")
        self._in_network(first.pid, "link set lo up")
        self._in_network(first.pid, f"addr add {ADDRESSES[name]}/24 dev eth0")
        self._in_network(first.pid, "link set eth0 up")
        assert node.stdin is not None
        node.stdin.write(b"the network is there\n")
        node.stdin.flush()
        eventually(lambda: self.state(name) in ("idle", "alloc", "comp"), f"node {name} up")

    def unplug(self, name: str) -> None:
        """End all processes of a node, and its network, at once."""
        first = self._first(name)
        assert first is not None
        first.kill()
        self._nodes.pop(name).wait()

    def state(self, name: str) -> str:
        """The state that Slurm has a node in, such as idle."""
        return self.run("sinfo", "--noheader", f"--nodes={name}", "--format=%t").strip()

    def processes(self, name: str) -> list[str]:
        """Command lines of the processes that live on a node, those of Slurm itself aside."""
        first = self._first(name)
        assert first is not None
        found = []
        for process in first.children(recursive=True):
            try:
                line, is_dead = " ".join(process.cmdline()), process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                continue
            if not is_dead and not line.startswith("slurmd "):
                found.append(line)
        return found

    def files(self, name: str, folder: str) -> list[str]:
        """Names in a folder that a node has for itself."""
        first = self._first(name)
        assert first is not None
        return sorted(os.listdir(f"/proc/{first.pid}/root{folder}"))

    def listeners(self, name: str) -> set[tuple[str, str]]:
        """Address and name of each program on a node that listens somewhere."""
        shown = self.on(name, "ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header")
        found = re.findall(r"^\S+ +\S+ +\S+ +(\S+):\d+ .*?users:\(\(\"([^\"]*)", shown, flags=re.MULTILINE)
        return {(host.removeprefix("[::ffff:").removesuffix("]"), program) for host, program in found}

    def on(self, name: str, *command: str) -> str:
        """Run a command on a node; its output, errors included."""
        first = self._first(name)
        assert first is not None
        inside = ["nsenter", f"--target={first.pid}", "--net", "--mount", "--pid", "--uts", "--", *command]
        done = subprocess.run(
            inside, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        return done.stdout

    def _first(self, name: str) -> psutil.Process | None:
        """The process with which a node begins and ends: the child of unshare, below nsenter."""
        children = psutil.Process(self._nodes[name].pid).children(recursive=True)
        return next((each for each in children if each.name() == "bash"), None)

    def _begin(self, *command: str) -> None:
        subprocess.Popen(
            self._inside(*command), env=self._environment, stdin=subprocess.DEVNULL, stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self._network}", "--net", "--mount", "--pid", "--uts", "--", *command]

    def _in_network(self, process: int, command: str) -> None:
        subprocess.run(
            ["nsenter", f"--target={process}", "--net", "ip", *command.split()], check=True, env=self._environment
        )


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A Slurm whose nodes are up. All its processes end with the context, or with this process."""
    for name in ("state", *(f"spool-{node}" for node in ADDRESSES)):
        (folder / name).mkdir(parents=True)
    lines = [f"{address} {name}" for name, address in {**ADDRESSES, "control": CONTROLLER}.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    nodes = [
        f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={CPUS} RealMemory=4000 Gres=gpu:{GPUS}"
        for name, address in ADDRESSES.items()
    ]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, nodes="\n".join(nodes)))
    # Slurm counts files as GPUs; nobody opens them.
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    # Reads to the end of this process, and takes everything along.
    network = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "bash", "-c", _NETWORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": _PATH, "HOSTS": str(folder / "hosts"), "ADDRESS": CONTROLLER},
    )
    assert network.stdin is not None
    assert network.stdout is not None
    try:
        assert network.stdout.readline() == b"ready\n"
        (first,) = psutil.Process(network.pid).children()
        cluster = SlurmCluster(folder, first.pid)
        cluster.start_controller()
        for name in ADDRESSES:
            cluster.start_node(name)
        yield cluster
    finally:
        network.stdin.close()
        network.wait(timeout=30)


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


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = _UP_S) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s:g} s: {what}"
        time.sleep(0.2)
