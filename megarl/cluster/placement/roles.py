"""Roles of a run: their resources, and the environment variables of their processes."""

import os

import ray

from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.cluster.placement.placement import Role
from megarl.process.own_programs import SAFE_PATH
from megarl.rollout import engine_kind
from megarl.schema import ClusterConfig, RolloutConfig

POLICY = "trainer"
"""Name of the role that trains the policy."""
ENGINE = "engine"
"""Name of the role that samples."""
_THREADS = "OMP_NUM_THREADS"
# Waiting threads sleep: if they spin, a rollout on a busy machine takes several times as long.
_SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
_DETERMINISTIC = {
    # One order of summation for all message sizes; Megatron-LM also accepts Tree, CollnetDirect, CollnetChain and
    # ^NVLS.
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # A cuBLAS workspace per stream, without which torch's deterministic mode refuses matmuls.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Environment of deterministic training, read by libraries when they are loaded; the rank itself configures torch."""


_ON_THIS_MACHINE = 0.0001
"""CPUs requested per process in the run's own cluster, Ray's smallest amount: there is no other work to separate from.
"""


def trainer_role(
    name: str,
    sizes: ParallelSizes,
    cluster: ClusterConfig,
    *,
    is_deterministic: bool = False,
    steps_on_host: bool = False,
    has_gpus: bool | None = None,
) -> Role:
    """The Megatron ranks of a model, each with a GPU of its own if the cluster has any; a TP group stays together.

    If `has_gpus` is None, Ray is asked whether the cluster has GPUs. A rank has one thread. With a GPU and
    `steps_on_host`, where the optimizer computes on the host, it has as many as there are cores per GPU.

    Ranks are numbered as in Megatron: tensor parallelism varies fastest.
    """
    has_gpus = _has_gpus() if has_gpus is None else has_gpus
    kernels = _DETERMINISTIC if is_deterministic else {}
    threads = {_THREADS: str(_cores_per_gpu(cluster))} if has_gpus and steps_on_host else {}
    return Role(
        name,
        sizes.world_size,
        _cpus(cluster, cluster.trainer_cpus),
        _gpus(cluster, 1) if has_gpus else 0,
        group=sizes.tensor_model_parallel_size,
        environment={**_environment(cluster), **threads, **_queues(sizes), **kernels, **cluster.environment},
    )


def _cores_per_gpu(cluster: ClusterConfig) -> int:
    """Cores per GPU, on the machine where they are fewest."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    # A run does not tell its own Ray cluster how many cores the machine has.
    here = len(os.sched_getaffinity(0)) if cluster.address is None else None
    return max(1, int(min(((here or each.get("CPU", 1)) / each["GPU"] for each in machines), default=1)))


def _queues(sizes: ParallelSizes) -> dict[str, str]:
    """Environment with the number of hardware queues for a rank's work."""
    # In a single queue FSDP2's all-gathers would wait for the layers that they should overlap with; Megatron-LM refuses
    # that.
    if sizes.use_torch_fsdp2:
        return {}
    # For overlapping tensor-parallel communication, Megatron relies on the order of a single queue.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def engine_role(cluster: ClusterConfig, rollout: RolloutConfig, *, has_gpus: bool | None = None) -> Role:
    """The processes of all engines: one per machine of an engine, with as many GPUs as it has workers there.

    If `has_gpus` is None, Ray is asked whether there are GPUs.
    """
    has_gpus = _has_gpus() if has_gpus is None else has_gpus
    kind = engine_kind(rollout.engine)
    workers, nodes = _workers_per_node(cluster, rollout), kind.nodes(rollout.engine_args)
    threads = 1 if has_gpus else engine_threads(cluster, rollout, len(os.sched_getaffinity(0)))
    environment = {**_environment(cluster), _THREADS: str(threads), **_SLEEPING}
    if cluster.address is None:
        environment |= kind.loopback_environment
    environment |= cluster.environment
    return Role(
        ENGINE,
        rollout.replicas * nodes,
        _cpus(cluster, cluster.engine_cpus),
        _gpus(cluster, workers) if has_gpus else 0,
        group=nodes,
        apart=nodes > 1,
        environment=environment,
    )


def engine_threads(cluster: ClusterConfig, rollout: RolloutConfig, cores: int) -> int:
    """Compute threads of each engine worker on a CPU machine with `cores` cores.

    Sampling and training take turns, so the engines get all cores: the ranks wait without spinning.
    """
    workers = _workers_per_node(cluster, rollout)
    if cluster.engine_threads is not None:
        return cluster.engine_threads
    if (given := os.environ.get(_THREADS, "")).isdigit():
        return int(given)
    if cluster.address is not None:
        return max(1, int(cluster.engine_cpus) // workers)
    return max(1, cores // (rollout.replicas * workers))


def _workers_per_node(cluster: ClusterConfig, rollout: RolloutConfig) -> int:
    kind = engine_kind(rollout.engine)
    workers, nodes = kind.workers(rollout.engine_args), kind.nodes(rollout.engine_args)
    if nodes > 1 and cluster.address is None:
        raise UserError(
            f"rollout.engine_args ask for an engine over {nodes} machines, and the run has this one alone: set"
            " cluster.address to a Ray cluster that has them"
        )
    if workers % nodes:
        raise UserError(
            f"rollout.engine_args ask for an engine of {workers} workers over {nodes} machines, each of which takes as"
            " many as the others: change one of the two"
        )
    return workers // nodes


def _gpus(cluster: ClusterConfig, whole: int) -> float:
    if cluster.gpu_share < 1 and max(whole, cluster.trainer_ranks) > 1:
        raise UserError(
            f"cluster.gpu_share={cluster.gpu_share} is for one Megatron rank beside engines of one GPU, and there are"
            f" cluster.trainer_ranks={cluster.trainer_ranks} and workers of {whole} GPUs: NCCL takes a GPU for one rank"
            " only; set it to 1"
        )
    return whole * cluster.gpu_share


def _cpus(cluster: ClusterConfig, cpus: float) -> float:
    return _ON_THIS_MACHINE if cluster.address is None else cpus


def _has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU", 0))


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    environment = {
        # One thread per rank: the ranks share the cores, and the order of summation stays fixed.
        _THREADS: "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **SAFE_PATH,
    }
    if cluster.address is None:
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo",
            # In the run's own folder, which is removed with the run, even if a process is killed.
            "TMPDIR": ray.get_runtime_context().get_temp_dir(),
        }
    return environment
