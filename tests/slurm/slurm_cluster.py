"""A real Slurm of two nodes on one host."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import machines
from machines import ADDRESSES, CONTROL, Machines, eventually, network

CPUS = 3
"""CPUs that Slurm has of each node, whatever this machine has."""
GPUS = 8
"""GPUs that Slurm believes a node to have."""
KILL_WAIT_S = 60
_CONFIGURATION = f"""
ClusterName=megarl
SlurmctldHost=control({CONTROL})
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


def missing() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    return machines.missing("slurmctld", "slurmd", "sbatch", "munged")


class SlurmCluster:
    """Nodes n1 and n2 of a Slurm that runs, each a machine of its own."""

    def __init__(self, nodes: Machines) -> None:
        self.nodes = nodes
        self.folder = nodes.folder
        self.run = nodes.outside
        """Runs a command of Slurm where the controller is; gives its output."""

    def start_controller(self) -> None:
        """Start what all nodes ask."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.nodes.begin_outside(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        eventually((self.folder / "munge.socket").exists, "munged")
        self.nodes.begin_outside("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def start_node(self, name: str) -> None:
        """Start a node, and wait until it can take jobs."""
        self.nodes.start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))
        eventually(lambda: self.state(name) in ("idle", "alloc", "comp"), f"node {name} up")

    def state(self, name: str) -> str:
        """The state that Slurm has a node in, such as idle."""
        return self.run("sinfo", "--noheader", f"--nodes={name}", "--format=%t").strip()

    def processes(self, name: str) -> list[str]:
        """Command lines of the processes that live on a node, those of Slurm itself aside."""
        return [line for line in self.nodes.processes(name) if not line.startswith("slurmd ")]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A Slurm whose nodes are up. All its processes end with the context, or with this process."""
    for name in ("state", *(f"spool-{node}" for node in ADDRESSES)):
        (folder / name).mkdir(parents=True)
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={CPUS} RealMemory=4000 Gres=gpu:{GPUS}"
        for name, address in ADDRESSES.items()
    ]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, nodes="\n".join(lines)))
    # Slurm counts files as GPUs; nobody opens them.
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    with network(folder, {"SLURM_CONF": str(folder / "slurm.conf")}) as nodes:
        cluster = SlurmCluster(nodes)
        cluster.start_controller()
        for name in ADDRESSES:
            cluster.start_node(name)
        yield cluster
