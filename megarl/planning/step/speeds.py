"""How fast work goes: the peaks of a device and its ports, and the share of them that is reached."""

from dataclasses import dataclass

from converters.cost.devices import Device
from megarl.planning.cluster import Cluster

_PRODUCTS, _MEMORY, _NVLINK, _NETWORK = 0.6, 0.7, 0.75, 0.8
"""The share of a peak that programs reach.

Products: cuBLAS reaches 0.8 of an H100's and a B200's peak with its best shapes (Bekman, Machine Learning Engineering,
"Maximum Achievable Matmul FLOPS"), and less with those of a layer. Memory: STREAM-like copies reach 0.9, decoding
kernels less. NVLink and network: the bus bandwidths of nccl-tests for large messages on DGX H100.
"""
_HOST_LINK_BYTES_PER_S = 25e9
"""Between a GPU and pinned memory of its host, each way: half of PCIe 5, which two GPUs share often."""
_NODE_MESSAGE_S = 15e-6
"""A collective inside a node, however small."""
_NETWORK_MESSAGE_S = 100e-6
"""A collective over nodes, however small."""
RECORDED_LAYER_S = 60e-6
"""The small kernels of a layer in a recorded CUDA graph."""
LAUNCHED_LAYER_S = 1e-3
"""A layer whose kernels Python launches one by one, forward: what a GPU waits for when there is little to do."""
ENGINE_STEP_S = 3e-3
"""Scheduling and sampling, once for each token of a batch."""
EXCHANGE_S = 5.0
"""An engine's pause and start around new weights: what it does beside receiving them."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of work on the GPUs of a cluster."""

    device: Device
    cluster: Cluster

    def products(self, flops: float, read_bytes: float, *, is_fp8: bool = False) -> float:
        """Matrix products that read so many bytes: the longer of computing and reading (the roofline)."""
        peak = self.device.fp8_flops if is_fp8 else self.device.bf16_flops
        return max(flops / (peak * _PRODUCTS), self.memory(read_bytes))

    def memory(self, nbytes: float) -> float:
        """Bytes to or from a GPU's memory."""
        return nbytes / (self.cluster.memory_bytes_per_s * _MEMORY)

    def host(self, nbytes: float) -> float:
        """Bytes of a GPU to or from its host."""
        return nbytes / _HOST_LINK_BYTES_PER_S

    def gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """An all-gather to `nbytes`, or a reduce-scatter of them, over `ranks` that are `stride` GPUs apart.

        Over nodes, the NICs of a node's GPUs in the group share the traffic.
        """
        if ranks == 1:
            return 0.0
        near = self._near(ranks, stride)
        rate, wait = self._nvlink, _NODE_MESSAGE_S
        if near < ranks:
            rate, wait = min(self._nvlink, near * self._network), _NETWORK_MESSAGE_S
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
        return _NODE_MESSAGE_S if is_near else _NETWORK_MESSAGE_S

    @property
    def _nvlink(self) -> float:
        return self.cluster.rates.nvlink_bytes_per_s_per_gpu * _NVLINK

    @property
    def _network(self) -> float:
        return self.cluster.rates.nic_bytes_per_s_per_gpu * _NETWORK
