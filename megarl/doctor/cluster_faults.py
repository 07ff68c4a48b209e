"""Finds faults of a cluster from measurements: nodes that are slow, broken or different from the rest."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from megarl.doctor.compilers import C_COMPILER, NVCC
from megarl.doctor.limits import SHARED_MEMORY, UNLIMITED_LOCKS, VERBS
from megarl.doctor.node_probe import Link, Node
from megarl.doctor.slow_links import late, rates_of, slow, slow_alone, slow_nodes, usual_latency_s
from megarl.process.gpudirect import GPUDIRECT
from megarl.process.rdma_devices import USABLE_PORT

SLOW_CPU = 0.5
"""A CPU below this fraction of the others' speed is a fault; the bound is low, as a CPU always runs other work, too."""
FREE_MEMORY = 0.7
"""A GPU of an unused node with less than this fraction of its memory free is a fault."""
CLOCK_S = 1.0
"""Clocks further apart make file times and logs confusing."""
OPEN_FILES = 8192
"""With fewer, connections among hundreds of ranks may fail: each is an open file, and so is each Ray worker."""
SHARED_MEMORY_BYTES = 1024**3
"""With less free in /dev/shm, as in a container by default, NCCL fails, and Ray keeps objects on a disk."""
LEAVE_OUT = "leave the node out (sbatch --exclude)"
"""The remedy for an unusable node."""


@dataclass(frozen=True)
class Fault:
    """A fault of a node, or of the link between two."""

    node: str
    what: str
    remedy: str
    refuses: bool = True
    """Whether it keeps a run from starting; otherwise it is a warning."""


def find_faults(nodes: Sequence[Node], links: Sequence[Link]) -> list[Fault]:
    """All faults, the worst first: wrong results, then what ends runs, then what slows them down."""
    return [fault for check in _CHECKS for fault in check(nodes, links)] if nodes else []


def _wrong_results(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        for compute in node.compute:
            if not compute.failure and not compute.is_right:
                yield Fault(node.name, f"{compute.device} multiplies matrices wrongly", LEAVE_OUT)


def _broken_devices(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        for compute in node.compute:
            if compute.failure:
                yield Fault(node.name, f"{compute.device} computes nothing ({compute.failure})", _LOOK_THERE)


def _no_way(_nodes: Sequence[Node], links: Sequence[Link]) -> Iterator[Fault]:
    for link in links:
        if link.failure:
            yield Fault(
                link.sender,
                f"no connection to {link.receiver} ({link.failure})",
                "open the ports above 1024 between the two",
            )


def _other_versions(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for package in sorted({name for node in nodes for name in node.versions}):
        usual = _most_common([node.versions.get(package) for node in nodes])
        for node in nodes:
            own = node.versions.get(package)
            if own != usual:
                said = f"{package} {own} is installed" if own else f"{package} is not installed"
                yield Fault(node.name, f"{said}, and {usual or 'none'} elsewhere", "install the same everywhere")


def _other_devices(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    measured = [node for node in nodes if node.compute]
    usual = _most_common([_devices(node) for node in measured])
    for node in measured:
        if _devices(node) != usual:
            yield Fault(node.name, f"it has {_devices(node)}, the others {usual}", LEAVE_OUT)


def _other_ports(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    usual = _most_common([_ports(node) for node in nodes])
    for node in nodes:
        if _ports(node) != usual:
            yield Fault(node.name, f"its InfiniBand ports that are up are {_ports(node)}, elsewhere {usual}", LEAVE_OUT)


def _locked_memory(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        if node.ports and node.limits.locked_memory_bytes is not None:
            said = f"it has InfiniBand, for which a process may lock no more than {node.limits.locked_memory}"
            yield Fault(node.name, said, UNLIMITED_LOCKS)


def _no_usable_ports(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    """The first node stands for all; if others have ports, `_other_ports` names those that have none."""
    without = [node for node in nodes if node.ports_obstacle]
    if len(without) == len(nodes):
        said = f"neither it nor another node can use InfiniBand: {without[0].ports_obstacle}"
        yield Fault(without[0].name, said, USABLE_PORT, refuses=False)


def _no_verbs(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        if node.ports and not node.has_verbs:
            yield Fault(node.name, "it has InfiniBand and no libibverbs, without which NCCL goes over sockets", VERBS)


def _no_gpudirect(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        if node.ports and node.gpudirect_obstacle:
            said = f"its InfiniBand cannot reach the memory of GPUs: {node.gpudirect_obstacle}"
            yield Fault(node.name, said, f"{GPUDIRECT}; else refit.transport=tcp", refuses=False)


def _no_compiler(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        if node.has_gpus and node.compilers.lacking:
            said = f"Triton can compile nothing there without {' and '.join(node.compilers.lacking)}"
            yield Fault(node.name, said, C_COMPILER)


def _no_nvcc(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    """Nodes without nvcc are named if other nodes have it; if none has it, the first one stands for all."""
    with_gpus = [node for node in nodes if node.has_gpus]
    without = [node for node in with_gpus if not node.compilers.has_nvcc]
    differ = len(without) < len(with_gpus)
    said = "it has no nvcc, and others have" if differ else "neither it nor another node with GPUs has nvcc"
    for node in without if differ else without[:1]:
        yield Fault(node.name, f"{said}: engines take other kernels without", NVCC, refuses=False)


def _few_open_files(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        if node.limits.open_files is not None and node.limits.open_files < OPEN_FILES:
            said = f"a process there may have no more than {node.limits.open_files} files open"
            yield Fault(node.name, said, _MORE_FILES, refuses=False)


def _little_shared_memory(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        free = node.shared_memory_bytes
        if free is not None and free < SHARED_MEMORY_BYTES:
            said = f"{free / 1024**2:.0f} MiB of /dev/shm are free there, for NCCL and Ray's objects"
            yield Fault(node.name, said, SHARED_MEMORY, refuses=False)


def _unseen_folders(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        for folder in node.unseen_folders:
            yield Fault(node.name, f"it does not see what {nodes[0].name} writes into {folder}", "mount it there, too")


def _unseen_inputs(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    for node in nodes:
        for path in node.unseen_inputs:
            yield Fault(
                node.name, f"it does not see {path}", "put it where all nodes see it, and give its absolute path"
            )


def _clocks(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    middle = median(node.clock_offset_s for node in nodes)
    for node in nodes:
        ahead = node.clock_offset_s - middle
        if abs(ahead) > CLOCK_S:
            where = "ahead of" if ahead > 0 else "behind"
            yield Fault(node.name, f"its clock is {abs(ahead):.1f} s {where} the others", "let chrony or ntpd set it")


def _slow_compute(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    rates = {(node.name, each.device): each.tflops for node in nodes for each in node.compute if not each.failure}
    for (name, device), rate, usual in slow(rates):
        if device == "cpu" and rate > SLOW_CPU * usual:
            continue
        yield Fault(name, f"{device} multiplies at {rate:.3g} TFLOP/s, the others at {usual:.3g}", _FREE_OR_LEAVE_OUT)


def _little_memory(nodes: Sequence[Node], _links: Sequence[Link]) -> Iterator[Fault]:
    """Compare with the whole memory, as what an earlier job left may be on all nodes."""
    for node in nodes:
        for each in node.compute:
            if each.device == "cpu" or each.failure or each.free_memory_bytes >= FREE_MEMORY * each.memory_bytes:
                continue
            free, memory = (amount / 1024**3 for amount in (each.free_memory_bytes, each.memory_bytes))
            yield Fault(
                node.name,
                f"{each.device} has {free:.0f} of {memory:.0f} GiB free",
                "end what holds it (nvidia-smi shows the processes)",
            )


def _slow_links(_nodes: Sequence[Node], links: Sequence[Link]) -> Iterator[Fault]:
    """A node whose links are slow is named once for all of them; a single slow link is a warning naming both ends."""
    rates = rates_of(links)
    nodes = slow_nodes(rates)
    for name, ways, rate, usual in nodes:
        sends, receives = (any(way[end] == name for way in ways) for end in (0, 1))
        how = "go to and from" if sends and receives else "go to" if sends else "come from"
        yield Fault(name, f"{rate:.2g} GB/s {how} other nodes, between those {usual:.2g}", _FREE_OR_LEAVE_OUT)
    for (sender, receiver), rate, usual in slow_alone(rates, nodes):
        said = f"{rate:.2g} GB/s go to {receiver}, between others {usual:.2g}"
        yield Fault(sender, said, "see to the cables and switches between the two", refuses=False)


def _late_links(_nodes: Sequence[Node], links: Sequence[Link]) -> Iterator[Fault]:
    usual = usual_latency_s(links)
    for link in late(links):
        said = f"a message to {link.receiver} and back takes {link.latency_s * 1e3:.1f} ms, usually {usual * 1e3:.2f}"
        yield Fault(link.sender, said, "see to the network between the two")


def _devices(node: Node) -> str:
    counts = Counter(compute.name if compute.device != "cpu" else "no GPU" for compute in node.compute)
    return ", ".join(f"{count} x {name}" if name != "no GPU" else name for name, count in sorted(counts.items()))


def _ports(node: Node) -> str:
    counts = Counter(port.gbit_per_s for port in node.ports)
    return ", ".join(f"{count} of {rate:g} Gbit/s" for rate, count in sorted(counts.items(), reverse=True)) or "none"


def _most_common(values: Sequence[str | None]) -> str | None:
    return Counter(values).most_common(1)[0][0] if values else None


_MORE_FILES = "raise the hard limit: LimitNOFILE=65536 of slurmd, or `ulimit -n` before `ray start`"
_LOOK_THERE = "see what nvidia-smi and `megarl doctor` say there, or leave the node out (sbatch --exclude)"
_FREE_OR_LEAVE_OUT = "end what else runs there, or leave the node out (sbatch --exclude)"
_CHECKS: tuple[Callable[[Sequence[Node], Sequence[Link]], Iterator[Fault]], ...] = (
    _wrong_results,
    _broken_devices,
    _no_way,
    _no_usable_ports,
    _locked_memory,
    _no_verbs,
    _no_gpudirect,
    _no_compiler,
    _no_nvcc,
    _few_open_files,
    _little_shared_memory,
    _unseen_folders,
    _unseen_inputs,
    _other_versions,
    _other_devices,
    _other_ports,
    _clocks,
    _little_memory,
    _slow_compute,
    _slow_links,
    _late_links,
)
