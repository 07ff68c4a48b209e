"""Where worker processes run and what they find in their environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.runtime import LOOPBACK
from megarl.config.schema import ClusterConfig


@dataclass(frozen=True)
class Place:
    """What one worker asks of the cluster."""

    cpus: float
    gpus: float
    environment: Mapping[str, str]
    timeout_s: float
    """How long to wait for the cluster to have room."""


def trainer_place(cluster: ClusterConfig) -> Place:
    """The place of one Megatron rank: a GPU of its own where the cluster has any."""
    # Where tensor-parallel communication overlaps, Megatron relies on the order that one hardware queue keeps.
    return _place(cluster, cluster.trainer_cpus, gpus=1, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def engine_place(cluster: ClusterConfig, engine_args: Mapping[str, Any]) -> Place:
    """The place of one engine: as many GPUs as its workers, where the cluster has any."""
    sizes = (engine_args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    gpus = 1
    for size in sizes:
        gpus *= size
    return _place(cluster, cluster.engine_cpus, gpus, environment={})


def _place(cluster: ClusterConfig, cpus: float, gpus: int, environment: Mapping[str, str]) -> Place:
    return Place(
        # On this machine alone nobody else's work has to be kept apart from ours.
        cpus=0 if cluster.address is None else cpus,
        gpus=gpus if ray.cluster_resources().get("GPU", 0) else 0,
        environment={**_environment(cluster), **environment},
        timeout_s=cluster.start_timeout_s,
    )


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    environment = {
        # One thread a process: the ranks and engines share the cores, and sums keep one order.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if cluster.address is None:
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": LOOPBACK,
            # In the run's own folder, which goes with it: a killed process leaves its temporary files.
            "TMPDIR": ray.get_runtime_context().get_temp_dir(),
        }
    return environment
