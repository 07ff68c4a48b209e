"""Where worker processes run and what they find in their environment."""

import ray

from megarl.cluster.runtime import LOOPBACK
from megarl.config.schema import ClusterConfig


def worker_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Environment variables of every worker process."""
    environment = {
        # One thread a process: the ranks and engines share the cores, and sums keep one order.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    if cluster.address is None:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
    return environment


def worker_host(cluster: ClusterConfig) -> str:
    """The address at which workers of this machine are reached: loopback unless the configuration names a cluster."""
    return LOOPBACK if cluster.address is None else ray.util.get_node_ip_address()
