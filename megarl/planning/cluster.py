"""The machines of a refit: GPUs per node, their rates, and the place of every rank."""

from dataclasses import dataclass

from converters.cost import Rates
from converters.errors import UserError
from converters.topology import Topology

_SLOWEST = 1e-3
"""Lowest rate, in its unit: even at 1 Mbit/s, a large model's nanoseconds fit in 64 bits."""
_LONGEST_US = 1e6
_MOST_ON_A_NODE = 65_536
"""Maximum of GPUs per node; each takes memory whether a rank uses it or not."""


@dataclass(frozen=True)
class Cores:
    """The processor cores of a node without GPUs, which all its ranks share; rates are per core with all cores working.

    If a core reads what it unpacks, as for one-sided reads without a network card, `unpack_gbyte_per_s` covers both.
    Raises UserError for less than one core, and for a rate of (nearly) zero or less.
    """

    per_node: int
    pack_gbyte_per_s: float
    unpack_gbyte_per_s: float
    message_us: float = 0.0
    """Fixed cost of a message for its sender, and again for its receiver, in addition to that of its bytes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value >= 0 if name == "message_us" else value > 0):
                raise UserError(f"the cores' {name} is {value}; it must be more than 0")
            _check_speed("cores'", name, value)
        if self.message_us > _LONGEST_US:
            raise UserError(f"the cores' message_us is {self.message_us}; it must be at most {_LONGEST_US:g}, a second")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs. Rates are per GPU and direction; the defaults are an H100's.

    With `cores`, GPUs are only places for ranks: the cores do the work, and NVLink stands for transfers between ranks
    of a node.

    Raises UserError for a size or a rate of (nearly) zero or less.
    """

    gpus_per_node: int = 8
    nic_gbit_per_s: float = 400.0
    nvlink_gbyte_per_s: float = 450.0
    memory_gbyte_per_s: float = 3350.0
    nodes: int | None = None
    """Number of nodes; None means as many as needed."""
    cores: Cores | None = None
    """Processor cores that do the work, for a cluster without GPUs."""

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
        """Give every rank a GPU, the trainer's nodes first.

        If colocated, destination ranks are on the GPUs of the first sources. If cores do the work, engines begin on the
        trainer's last node if it has room.

        Raises UserError if the cluster is too small for the ranks, or if colocated engines have too few GPUs.
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
    """Raise UserError for a rate so low that nothing would ever finish."""
    if name.endswith("_per_s") and isinstance(value, float | int) and value < _SLOWEST:
        raise UserError(f"the {whose} {name} is {value}; it must be at least {_SLOWEST:g}")
