"""Roles of a run: what each asks of the cluster, and what its processes find in their environment."""

import os

import ray

from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.cluster.placement.placement import Role
from megarl.process.own_programs import SAFE_PATH
from megarl.rollout import engine_kind
from megarl.schema import ClusterConfig, RolloutConfig

POLICY = "trainer"
"""The name of the role whose model is the policy."""
ENGINE = "engine"
"""The name of the role that samples."""
_THREADS = "OMP_NUM_THREADS"
# Threads that wait for each other sleep: on a busy machine a rollout takes several times as long where they spin.
_SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
_DETERMINISTIC = {
    # One order of sums, whatever the messages; Megatron-LM takes Tree, CollnetDirect, CollnetChain and ^NVLS, too.
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # A workspace of cuBLAS for each stream, without which torch refuses its products.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Libraries that a rank loads look for it as they start; the rank itself tells torch."""


_ON_THIS_MACHINE = 0.0001
"""CPUs that a process of a cluster of our own asks for, Ray's smallest part: nobody else's work is kept apart there."""


def trainer_role(
    name: str,
    sizes: ParallelSizes,
    cluster: ClusterConfig,
    *,
    is_deterministic: bool = False,
    steps_on_host: bool = False,
    has_gpus: bool | None = None,
) -> Role:
    """The Megatron ranks of a model, each with a GPU of its own where the cluster has any; a TP group belongs together.

    Without `has_gpus`, Ray is asked whether the cluster has GPUs. A rank has one thread, but beside a GPU with
    `steps_on_host`, where its optimizer computes on the host, as many as there are cores for each GPU.

    They are numbered as Megatron numbers them: tensor parallelism varies fastest.
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
    """How many cores each GPU has a right to, on the machine where these are fewest."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    # In a cluster of its own a run does not tell Ray how many cores the machine has.
    here = len(os.sched_getaffinity(0)) if cluster.address is None else None
    return max(1, int(min(((here or each.get("CPU", 1)) / each["GPU"] for each in machines), default=1)))


def _queues(sizes: ParallelSizes) -> dict[str, str]:
    """How many hardware queues a GPU takes the work of a rank from."""
    # In one queue FSDP2's gathers would wait for the layers that they are to run beside: Megatron-LM refuses that.
    if sizes.use_torch_fsdp2:
        return {}
    # Where tensor-parallel communication overlaps, Megatron relies on the order that one queue keeps.
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def engine_role(cluster: ClusterConfig, rollout: RolloutConfig, *, has_gpus: bool | None = None) -> Role:
    """The processes of all engines: one on each machine of an engine, with as many GPUs as its workers there.

    Whether there are GPUs is asked of Ray where `has_gpus` is not given.
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
    """How many threads each engine worker computes with on CPUs, of which this machine has `cores` cores.

    Sampling and training take turns, so the engines have all of them: the ranks wait, and do not spin.
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
        # One thread a rank: the ranks share the cores, and sums keep one order.
        _THREADS: "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **SAFE_PATH,
    }
    if cluster.address is None:
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo",
            # In the run's own folder, which goes with it: a killed process leaves its temporary files.
            "TMPDIR": ray.get_runtime_context().get_temp_dir(),
        }
    return environment
