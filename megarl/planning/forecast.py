"""Predicts the time of a refit: each stage by its busiest rank or port, the lower bound, and the replay."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from converters.cost import Port, Ports, Traffic, busiest_port, lower_bounds
from megarl.planning.messages import Integers
from megarl.planning.refit import PlannedRefit
from megarl.planning.replay import RankRates, Replay, replay

# How often a message's bytes pass through a GPU's memory. Packing reads the weights and writes the message, with more
# passes if it quantises (`NumberFormat.pack_passes`); unpacking reads the message and writes the parameters. Checksums
# are computed from what the kernels have already read.
_PACK_PASSES = 2
_UNPACK_PASSES = 2


@dataclass(frozen=True)
class Load:
    """Bytes through ports of one kind, int64 [ports], and the name of the thing that has such a port."""

    name: str
    place: str
    nbytes: Integers

    @property
    def busiest(self) -> int:
        """Index of the port with the most bytes."""
        return int(self.nbytes.argmax())

    @property
    def most(self) -> int:
        """Bytes of the busiest port."""
        return int(self.nbytes[self.busiest])

    @property
    def mean(self) -> float:
        """Mean bytes of the ports that have any."""
        return float(self.nbytes.sum() / max(1, np.count_nonzero(self.nbytes)))


@dataclass(frozen=True)
class Forecast:
    """Cost of a refit. A stage's seconds are those of its busiest rank or port, as if it never waited."""

    refit: PlannedRefit
    traffic: Traffic
    ports: Ports
    replay: Replay
    work: RankRates

    @property
    def peers(self) -> tuple[int, int]:
        """The largest number of peers of a trainer rank, and of an engine worker."""
        relays = np.count_nonzero(self.traffic.relayed, axis=0) + np.count_nonzero(self.traffic.relayed, axis=1)
        of_workers = np.count_nonzero(self.traffic.direct, axis=0) + relays
        return int(np.count_nonzero(self.traffic.direct, axis=1).max()), int(of_workers.max())

    @property
    def pairs(self) -> tuple[int, int]:
        """Number of (trainer rank, worker) pairs that communicate through node memory, and through the network."""
        topology = self.traffic.topology
        are_near = np.equal.outer(np.asarray(topology.source_node), np.asarray(topology.destination_node))
        near = np.count_nonzero(self.traffic.direct[are_near])
        return int(near), int(np.count_nonzero(self.traffic.direct) - near)

    @classmethod
    def of(cls, refit: PlannedRefit, traffic: Traffic) -> "Forecast":
        """Predict and replay `traffic`."""
        work = _rank_rates(refit)
        played = replay(traffic, refit.cluster.rates, work, bucket_bytes=refit.bucket_bytes, buckets=refit.buckets)
        return cls(refit, traffic, Ports.of(traffic), played, work)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Bytes of every kind of port: GPUs and nodes as a whole, NICs, NVLink."""
        ports, gpus = self.ports, np.arange(self.traffic.topology.gpus)
        node_of = np.zeros(len(gpus), np.int64)
        place = self.traffic.topology
        node_of[list(place.source_gpu)] = place.source_node
        node_of[list(place.destination_gpu)] = place.destination_node
        nodes = np.zeros((2, place.nodes), np.int64)
        np.add.at(nodes[0], node_of, ports.nic_out)
        np.add.at(nodes[1], node_of, ports.nic_in)
        return (
            Load("out of a GPU", "GPU", ports.nic_out + ports.nvlink_out),
            Load("into a GPU", "GPU", ports.nic_in + ports.nvlink_in),
            Load("NIC out", "GPU", ports.nic_out),
            Load("NIC in", "GPU", ports.nic_in),
            Load("NVLink out", "GPU", ports.nvlink_out),
            Load("NVLink in", "GPU", ports.nvlink_in),
            Load("NICs of a node out", "node", nodes[0]),
            Load("NICs of a node in", "node", nodes[1]),
        )

    @property
    def stages(self) -> dict[str, float]:
        """Name of a stage -> its seconds."""
        busy = self.ports.seconds(self.refit.cluster.rates)
        direct, relayed = self.traffic.direct, self.traffic.relayed
        unpacked = direct.sum(axis=0) + relayed.sum(axis=0)
        cores = {} if self.work.cores is None else {"cores": self._core_seconds}
        return {
            "pack": float(direct.sum(axis=1).max() / self.work.pack_bytes_per_s),
            "network": float(max(busy["nic_out"].max(), busy["nic_in"].max())),
            "nvlink": float(max(busy["nvlink_out"].max(), busy["nvlink_in"].max())),
            "unpack": float(unpacked.max() / self.work.unpack_bytes_per_s),
            **cores,
        }

    @property
    def _core_seconds(self) -> float:
        """Seconds of all work that a node's cores do, for the node with the most."""
        played, place = self.replay, self.traffic.topology
        messages, rates, sources = played.messages, self.work, len(place.source_node)
        of_sender = np.array([*place.source_node, *place.destination_node])[messages.sender]
        of_receiver = np.asarray(place.destination_node)[messages.receiver]
        moves = np.where(of_sender == of_receiver, played.routes.nanoseconds / 1e9, 0.0)
        packing = np.where(messages.sender < sources, messages.nbytes / rates.pack_bytes_per_s + rates.message_s, 0.0)
        busy = np.zeros(place.nodes)
        np.add.at(busy, of_sender, packing)
        np.add.at(busy, of_receiver, messages.nbytes / rates.unpack_bytes_per_s + rates.message_s + moves)
        return float(busy.max() / (rates.cores or 1))

    @property
    def transfer_seconds(self) -> float:
        """Predicted time of moving the bytes, with network and NVLink at the same time."""
        return self.binding_port.seconds

    @property
    def predicted_seconds(self) -> float:
        """Predicted total time: the slowest stage, since stages overlap, plus packing and unpacking one message."""
        largest = float(self.replay.messages.nbytes.max(initial=0))
        ends = largest / self.work.pack_bytes_per_s + largest / self.work.unpack_bytes_per_s
        return max(self.stages.values()) + ends

    @cached_property
    def lower_bounds(self) -> dict[str, float]:
        """Name of a constraint -> the seconds that no plan can beat because of it."""
        return lower_bounds(self.traffic, self.refit.cluster.rates)

    @property
    def lower_bound_seconds(self) -> float:
        """The largest of `lower_bounds`."""
        return max(self.lower_bounds.values())

    @property
    def binding_port(self) -> Port:
        """The port that is busy longest."""
        return busiest_port(self.traffic, self.refit.cluster.rates)

    def over_lower_bound(self, seconds: float) -> float:
        """`seconds` as a multiple of the lower bound; 1 if both are zero."""
        lower_bound_seconds = self.lower_bound_seconds
        return seconds / lower_bound_seconds if lower_bound_seconds else 1.0 if not seconds else float("inf")

    @property
    def extra_bytes_per_gpu(self) -> int:
        """Peak memory of the buckets on a GPU: those of every rank on it."""
        return (2 if self.refit.colocated else 1) * self.refit.buckets * self.refit.bucket_bytes


def _rank_rates(refit: PlannedRefit) -> RankRates:
    cores, memory = refit.cluster.cores, refit.cluster.memory_bytes_per_s
    if cores is None:
        passes = refit.number_format.pack_passes if refit.number_format else _PACK_PASSES
        assert passes is not None, "no refit is planned in a format that loaders alone make"
        return RankRates(memory / passes, memory / _UNPACK_PASSES)
    return RankRates(
        cores.pack_gbyte_per_s * 1e9, cores.unpack_gbyte_per_s * 1e9, cores.message_us / 1e6, cores.per_node
    )
