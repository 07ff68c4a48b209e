"""Speeds of work: the peak rates of devices and ports, and the share of them that is reached."""

from dataclasses import dataclass

from converters.cost.devices import Device
from megarl.planning.cluster import Cluster

_PRODUCTS, _MEMORY, _NVLINK, _NETWORK = 0.6, 0.7, 0.75, 0.8
"""The share of a peak that programs reach.

Products: cuBLAS reaches 0.8 of the peak of an H100 or B200 with its best shapes (Bekman, Machine Learning Engineering,
"Maximum Achievable Matmul FLOPS"), and less with those of a layer. Memory: STREAM-like copies reach 0.9, decoding
kernels less. NVLink and network: the bus bandwidths of nccl-tests for large messages on DGX H100.
"""
_HOST_LINK_BYTES_PER_S = 25e9
"""Between a GPU and its host's pinned memory, each way: half of PCIe 5, which two GPUs often share."""
_NODE_MESSAGE_S = 15e-6
"""Latency of a collective inside a node."""
_NETWORK_MESSAGE_S = 100e-6
"""Latency of a collective across nodes."""
RECORDED_LAYER_S = 60e-6
"""The small kernels of a layer in a CUDA graph."""
LAUNCHED_LAYER_S = 1e-3
"""Launching a layer's forward kernels one by one from Python, which a GPU with little work waits for."""
ENGINE_STEP_S = 3e-3
"""Scheduling and sampling, once per decoding step."""
EXCHANGE_S = 5.0
"""Pausing and restarting an engine for new weights, without receiving them."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of work on the GPUs of a cluster."""

    device: Device
    cluster: Cluster

    def products(self, flops: float, read_bytes: float, *, is_fp8: bool = False) -> float:
        """Matrix products that read `read_bytes`: the longer of computing and reading (roofline model)."""
        peak = self.device.fp8_flops if is_fp8 else self.device.bf16_flops
        return max(flops / (peak * _PRODUCTS), self.memory(read_bytes))

    def memory(self, nbytes: float) -> float:
        """Reading or writing a GPU's memory."""
        return nbytes / (self.cluster.memory_bytes_per_s * _MEMORY)

    def host(self, nbytes: float) -> float:
        """Copying between a GPU and its host."""
        return nbytes / _HOST_LINK_BYTES_PER_S

    def gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """An all-gather to `nbytes`, or a reduce-scatter of `nbytes`, over `ranks` that are `stride` GPUs apart.

        Across nodes, the NICs of a node's GPUs in the group share the traffic.
        """
        if ranks == 1:
            return 0.0
        near = self._near(ranks, stride)
        rate, wait = self._nvlink, _NODE_MESSAGE_S
        if near < ranks:
            rate, wait = min(self._nvlink, near * self._network), _NETWORK_MESSAGE_S
        return wait + nbytes * (ranks - 1) / ranks / rate

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """An all-reduce of `nbytes`: a reduce-scatter and an all-gather, with one start-up cost."""
        if ranks == 1:
            return 0.0
        return 2 * self.gather(nbytes, ranks) - self._wait(ranks)

    def all_to_all(self, nbytes: float, ranks: int) -> float:
        """An all-to-all in which each rank sends `nbytes`, in equal parts to all, over NVLink and NIC at once."""
        if ranks == 1:
            return 0.0
        near = self._near(ranks)
        over_nvlink = nbytes * (near - 1) / ranks / self._nvlink
        over_network = nbytes * (ranks - near) / ranks / self._network
        return self._wait(ranks) + max(over_nvlink, over_network)

    def send(self, nbytes: float) -> float:
        """Sending to a GPU on another node."""
        return nbytes / self._network

    def _near(self, ranks: int, stride: int = 1) -> int:
        """Number of a group's ranks on one node."""
        return min(ranks, max(1, self.cluster.gpus_per_node // stride))

    def _wait(self, ranks: int) -> float:
        is_near = self._near(ranks) == ranks
        return _NODE_MESSAGE_S if is_near else _NETWORK_MESSAGE_S

    @property
    def _nvlink(self) -> float:
        return self.cluster.rates.nvlink_bytes_per_s_per_gpu * _NVLINK

    @property
    def _network(self) -> float:
        return self.cluster.rates.nic_bytes_per_s_per_gpu * _NETWORK
