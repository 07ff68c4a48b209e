"""How fast work goes: the peaks of a device and its ports, and the share of them that is reached."""

from dataclasses import dataclass, field

from converters.cost.devices import Device
from megarl.planning.cluster import Cluster


@dataclass(frozen=True)
class Reached:
    """The share of a peak that programs reach, and times that no rate explains.

    Products: cuBLAS reaches 0.8 of an H100's and a B200's peak with its best shapes (Bekman, Machine Learning
    Engineering, "Maximum Achievable Matmul FLOPS"), and less with those of a layer. Memory: STREAM-like copies reach
    0.9, decoding kernels less. NVLink and network: the bus bandwidths of nccl-tests for large messages on DGX H100. The
    times are those of small kernels and messages.
    """

    products: float = 0.6
    memory: float = 0.7
    nvlink: float = 0.75
    network: float = 0.8
    host_link_bytes_per_s: float = 25e9
    """Between a GPU and pinned memory of its host, each way: half of PCIe 5, which two GPUs share often."""
    node_message_s: float = 15e-6
    """A collective inside a node, however small."""
    network_message_s: float = 100e-6
    """A collective over nodes, however small."""
    recorded_layer_s: float = 60e-6
    """The small kernels of a layer in a recorded CUDA graph."""
    launched_layer_s: float = 1e-3
    """A layer whose kernels Python launches one by one, forward: what a GPU waits for when there is little to do."""
    engine_step_s: float = 3e-3
    """Scheduling and sampling, once for each token of a batch."""
    exchange_s: float = 5.0
    """An engine's pause and start around new weights: what it does beside receiving them."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of work on the GPUs of a cluster."""

    device: Device
    cluster: Cluster
    reached: Reached = field(default_factory=Reached)

    def products(self, flops: float, read_bytes: float, *, is_fp8: bool = False) -> float:
        """Matrix products that read so many bytes: the longer of computing and reading (the roofline)."""
        peak = self.device.fp8_flops if is_fp8 else self.device.bf16_flops
        return max(flops / (peak * self.reached.products), self.memory(read_bytes))

    def memory(self, nbytes: float) -> float:
        """Bytes to or from a GPU's memory."""
        return nbytes / (self.cluster.memory_bytes_per_s * self.reached.memory)

    def host(self, nbytes: float) -> float:
        """Bytes of a GPU to or from its host."""
        return nbytes / self.reached.host_link_bytes_per_s

    def gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """An all-gather to `nbytes`, or a reduce-scatter of them, over `ranks` that are `stride` GPUs apart.

        Over nodes, the NICs of a node's GPUs in the group share the traffic.
        """
        if ranks == 1:
            return 0.0
        near = self._near(ranks, stride)
        rate, wait = self._nvlink, self.reached.node_message_s
        if near < ranks:
            rate, wait = min(self._nvlink, near * self._network), self.reached.network_message_s
        return wait + nbytes * (ranks - 1) / ranks / rate

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """A sum of `nbytes` that all ranks get: a reduce-scatter and an all-gather, started once."""
        if ranks == 1:
            return 0.0
        return 2 * self.gather(nbytes, ranks) - self._wait(ranks)

    def all_to_all(self, nbytes: float, ranks: int) -> float:
        """An exchange in which each rank sends `nbytes`, equal parts to all: NVLink and NIC at the same time."""
        if ranks == 1:
            return 0.0
        near = self._near(ranks)
        over_nvlink = nbytes * (near - 1) / ranks / self._nvlink
        over_network = nbytes * (ranks - near) / ranks / self._network
        return self._wait(ranks) + max(over_nvlink, over_network)

    def send(self, nbytes: float) -> float:
        """Bytes to a GPU of another node."""
        return nbytes / self._network

    def _near(self, ranks: int, stride: int = 1) -> int:
        """Ranks of a group on one node."""
        return min(ranks, max(1, self.cluster.gpus_per_node // stride))

    def _wait(self, ranks: int) -> float:
        is_near = self._near(ranks) == ranks
        return self.reached.node_message_s if is_near else self.reached.network_message_s

    @property
    def _nvlink(self) -> float:
        return self.cluster.rates.nvlink_bytes_per_s_per_gpu * self.reached.nvlink

    @property
    def _network(self) -> float:
        return self.cluster.rates.nic_bytes_per_s_per_gpu * self.reached.network
