"""Ports: how long traffic keeps every NIC and every GPU's NVLink busy, and lower bounds of that."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from converters.cost.traffic_matrix import Traffic
from converters.errors import UserError
from converters.topology import Topology


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the ports of one GPU, in each direction: 400 Gb/s InfiniBand is 50e9, H100 NVLink 450e9."""

    nic_bytes_per_s_per_gpu: float
    nvlink_bytes_per_s_per_gpu: float

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if rate <= 0:
                raise UserError(f"{name} is {rate}; give the rate of the cluster in bytes per second")


@dataclass(frozen=True)
class Ports:
    """Bytes through every port, each int64 [GPUs]. Bytes between two ranks of one GPU pass none."""

    nic_out: np.ndarray
    nic_in: np.ndarray
    nvlink_out: np.ndarray
    nvlink_in: np.ndarray

    @classmethod
    def of(cls, traffic: Traffic) -> "Ports":
        """The load of the ports: NIC between nodes, NVLink between the GPUs of a node."""
        place = traffic.topology
        nodes = np.asarray(place.source_node), np.asarray(place.destination_node)
        gpus = np.asarray(place.source_gpu), np.asarray(place.destination_gpu)
        other_node = nodes[0][:, None] != nodes[1][None, :]
        other_gpu = gpus[0][:, None] != gpus[1][None, :]
        far, near = traffic.direct * other_node, traffic.direct * (other_gpu & ~other_node)
        relayed = traffic.relayed * (gpus[1][:, None] != gpus[1][None, :])
        return cls(
            nic_out=_per_gpu(place, gpus[0], far.sum(1)),
            nic_in=_per_gpu(place, gpus[1], far.sum(0)),
            nvlink_out=_per_gpu(place, gpus[0], near.sum(1)) + _per_gpu(place, gpus[1], relayed.sum(1)),
            nvlink_in=_per_gpu(place, gpus[1], near.sum(0) + relayed.sum(0)),
        )

    def seconds(self, rates: Rates) -> dict[str, np.ndarray]:
        """Name of each kind of port -> float64 [GPUs]: how long each is busy."""
        nic, nvlink = rates.nic_bytes_per_s_per_gpu, rates.nvlink_bytes_per_s_per_gpu
        return {name: load / (nic if name.startswith("nic") else nvlink) for name, load in vars(self).items()}


@dataclass(frozen=True)
class Port:
    """One port: its kind (a field of `Ports`), its GPU, and how long it is busy."""

    kind: str
    gpu: int
    seconds: float


def busiest_port(traffic: Traffic, rates: Rates) -> Port:
    """The port that is busy for longest, which predicts the time of a transfer.

    Assumes that all ports are busy at the same time, so that a relay follows the arrival of its bytes closely, and
    that no switch is slower than the ports that it joins.
    """
    busy = Ports.of(traffic).seconds(rates)
    return max(
        (Port(kind, int(each.argmax()), float(each.max())) for kind, each in busy.items()),
        key=lambda port: port.seconds,
    )


def lower_bounds(traffic: Traffic, rates: Rates) -> dict[str, float]:
    """Lower bounds in seconds for any plan, by their cause:

    - `node_in`: what the destinations of a node need, and no source of the node holds, comes in at least once, through
      the NICs of all GPUs that destinations run on, each of which can take any of it: max over nodes of
      entering / (GPUs x NIC).
    - `sources_out`: what only some sources hold goes out through their NICs at least once for every node that needs it
      and has no source that holds it: max over every set of ranks that hold something in common, and over all sources,
      of what only they hold / (GPUs x NIC).
    - `gpu_in`: what a destination needs comes through the NIC or the NVLink of its GPU:
      max over destinations of needed / (NIC + NVLink). Counted only on GPUs without a source.

    Assumes that each port runs at its full rate all the time, in both directions at once, and that switches add
    nothing. Bytes are counted in the destination's dtype, whatever the plan moves.
    """
    place = traffic.topology
    nic, nvlink = rates.nic_bytes_per_s_per_gpu, rates.nvlink_bytes_per_s_per_gpu
    gpus_of_node = np.zeros(place.nodes, np.int64)
    for node, _ in set(zip(place.destination_node, place.destination_gpu, strict=True)):
        gpus_of_node[node] += 1
    needed = np.zeros(place.gpus, np.int64)
    np.maximum.at(needed, np.asarray(place.destination_gpu), traffic.needed)
    needed[np.asarray(place.source_gpu)] = 0
    return {
        "node_in": float((traffic.entering / np.maximum(gpus_of_node, 1)).max() / nic),
        "sources_out": _most_per_gpu(traffic) / nic,
        "gpu_in": float(needed.max() / (nic + nvlink)),
    }


def _most_per_gpu(traffic: Traffic) -> float:
    """The most bytes per GPU that only the ranks of one set hold, over the sets in `leaving` and that of all ranks."""
    source_gpu = traffic.topology.source_gpu
    # Sets as bitmasks, so that thousands can be compared with each other.
    gpus: dict[int, int] = defaultdict(int)
    for ranks, size in traffic.leaving.items():
        gpus[sum(1 << gpu for gpu in {source_gpu[rank] for rank in ranks})] += size
    everywhere = sum(1 << gpu for gpu in set(source_gpu))
    return max(
        sum(size for inner, size in gpus.items() if inner | outer == outer) / outer.bit_count()
        for outer in {*gpus, everywhere}
    )


def _per_gpu(place: Topology, gpus: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The loads of ranks, summed over the ranks of each GPU, without float64's rounding."""
    total = np.zeros(place.gpus, np.int64)
    np.add.at(total, gpus, loads)
    return total
