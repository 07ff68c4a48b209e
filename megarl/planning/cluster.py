"""The machines of a refit: how many GPUs a node has, how fast each talks, and which rank is where."""

from dataclasses import dataclass

from converters.cost import Rates
from converters.errors import UserError
from converters.topology import Topology

_SLOWEST = 1e-3
"""Least rate, in its unit: at 1 Mbit/s the nanoseconds of a large model still fit in 64 bits."""
_LONGEST_US = 1e6
_MOST_ON_A_NODE = 65_536
"""Ranks of a node, each of which has a place in memory whether it is used or not."""


@dataclass(frozen=True)
class Cores:
    """The processor cores of a node without GPUs, which all its ranks share; rates are of one core while all work.

    A core that reads what it unpacks, as one-sided reads without a network card do, has both in `unpack_gbyte_per_s`.
    Raises UserError for less than a core, and for a rate of (nearly) zero or less.
    """

    per_node: int
    pack_gbyte_per_s: float
    unpack_gbyte_per_s: float
    message_us: float = 0.0
    """Cost of a message for its sender, and again for its receiver, beside that of its bytes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value >= 0 if name == "message_us" else value > 0):
                raise UserError(f"the cores' {name} is {value}; it must be more than 0")
            _check_speed("cores'", name, value)
        if self.message_us > _LONGEST_US:
            raise UserError(f"the cores' message_us is {self.message_us}; it must be at most {_LONGEST_US:g}, a second")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs. The rates are those of one GPU, in and out at once; by default an H100's.

    With `cores` the GPUs are places for ranks, which work on these, and NVLink is their way to each other.

    Raises UserError for a size or a rate of (nearly) zero or less.
    """

    gpus_per_node: int = 8
    nic_gbit_per_s: float = 400.0
    nvlink_gbyte_per_s: float = 450.0
    memory_gbyte_per_s: float = 3350.0
    nodes: int | None = None
    """Nodes that there are; None is as many as it takes."""
    cores: Cores | None = None
    """Processor cores that do the work of GPUs, on a cluster without GPUs."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "cores" and value is not None and not value > 0:
                raise UserError(f"the cluster's {name} is {value}; it must be more than 0")
            _check_speed("cluster's", name, value)
        if self.gpus_per_node > _MOST_ON_A_NODE:
            raise UserError(
                f"the cluster's gpus_per_node is {self.gpus_per_node}; it must be at most {_MOST_ON_A_NODE:,}"
            )

    @property
    def rates(self) -> Rates:
        """Bytes per second of a GPU's ports."""
        return Rates(
            nic_bytes_per_s_per_gpu=self.nic_gbit_per_s * 1e9 / 8,
            nvlink_bytes_per_s_per_gpu=self.nvlink_gbyte_per_s * 1e9,
        )

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes per second that a GPU's memory reads or writes."""
        return self.memory_gbyte_per_s * 1e9

    def topology(self, sources: int, destinations: int, *, colocated: bool) -> Topology:
        """A GPU for every rank, the trainer's nodes first; or destination ranks on the GPUs of the first sources.

        Where cores do the work, engines begin on the trainer's last node if it has room.

        Raises UserError where the cluster does not hold the ranks, and where colocated engines have no GPU.
        """
        if colocated and destinations > sources:
            raise UserError(
                f"the engines' {destinations} ranks do not fit on the trainer's {sources} GPUs; lower --replicas, raise"
                " --gpus or leave out --colocated"
            )
        apart = Topology.separate if self.cores is None else Topology.in_a_row
        place = Topology.colocated if colocated else apart
        topology = place(sources, destinations, self.gpus_per_node)
        if self.nodes is not None and topology.nodes > self.nodes:
            raise UserError(
                f"{sources} ranks of the trainer and {destinations} of the engines take {topology.nodes} nodes of"
                f" {self.gpus_per_node} GPUs, and the cluster has {self.nodes}; raise --nodes or lower the sizes"
            )
        return topology


def _check_speed(whose: str, name: str, value: object) -> None:
    """Raise UserError for a rate at which nothing would end."""
    if name.endswith("_per_s") and isinstance(value, float | int) and value < _SLOWEST:
        raise UserError(f"the {whose} {name} is {value}; it must be at least {_SLOWEST:g}")
