"""Processes of a run and the machines they run on: the keys below `cluster`."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class PoolConfig:
    """Machines of the cluster, or a part of each, that are reserved for some roles."""

    roles: list[str] = MISSING
    """Roles that run here: trainer, engine, critic, reward_model, implicit_reward_model, teacher_NAME."""
    nodes: int = MISSING
    """Number of machines."""
    gpus: int | None = None
    """GPUs of each of these machines, with the same share of its CPUs; null is the whole machine."""
    shared: bool = False
    """Colocate trainer, engines and all other roles of the pool on the same GPUs, where they take turns
    (`megarl train`)."""


@dataclass
class ClusterConfig:
    """Where the processes run."""

    trainer_ranks: int = 1
    """Megatron ranks of the policy: TP x CP x PP x DP. Experts (EP, ETP) are distributed over the same ranks."""
    address: str | None = None
    """Address of a running Ray cluster; null starts a cluster of this machine alone, on loopback."""
    nodes: int | None = None
    """Machines that a run with `address` waits for, at most `start_timeout_s`, before it starts or resumes after losing
    one. null takes the machines that are there."""
    rendezvous_port: int = 0
    """Rendezvous port of the policy's Megatron ranks; 0 takes a free one, as the ranks of all other models do."""
    object_store_bytes: int | None = None
    """Shared memory for the data of steps, in bytes, if megarl starts the cluster itself; data beyond it spills to
    disk. null is 30 % of the available memory, or half of the free space of /dev/shm if that is less, but at least
    256 MiB and at most 200 GB."""
    trainer_cpus: float = 1.0
    """CPU cores that Ray reserves for each Megatron rank."""
    engine_cpus: float = 1.0
    """CPU cores that Ray reserves for each engine."""
    gpu_share: float = 1.0
    """Fraction of a GPU that each Megatron rank and each engine reserves. Below 1 a rank and an engine can share a GPU:
    for a single rank and engines of one GPU each; rollout.engine_args.gpu_memory_utilization has to leave room."""
    engine_threads: int | None = None
    """Threads of each engine worker on a CPU. null is OMP_NUM_THREADS if the environment has it; else, with `address`,
    `engine_cpus` divided by the engine's workers; without it, the cores of this machine divided by the workers of all
    engines, since trainer ranks wait during a rollout. Sampled tokens may depend on it."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Machines, or GPUs of machines, that are reserved for some roles; roles in no pool are placed on the rest."""
    device_memory_bytes: int | None = None
    """Without GPUs, emulates their memory limit: the bytes of weights, gradients, optimizer states and caches that the
    processes of a shared pool may hold on a machine at a time; null is no limit."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks and engines, such as those of NCCL and UCX. They override the environment of
    the Ray nodes and the variables that megarl sets: NCCL_IB_HCA="" leaves the choice to NCCL."""
    check_nodes: bool = True
    """Check the machines of a cluster with `address` and several machines before anything starts, as `megarl doctor
    --cluster` does, and refuse to start if one is slow, broken or different from the rest."""
    start_timeout_s: float = 300.0
    """How long processes of ranks and engines may take to start, and how long to wait for resources that are in use, in
    seconds."""
    silence_timeout_s: float = 600.0
    """Seconds without a sign of life after which a rank or an engine is killed and treated as dead. Ranks answer while
    they compute, engines that serve between two engine steps, so this must be longer than any engine step, and than
    offloading an engine for the trainer or bringing it back. A refit may keep an engine busy for longer; see
    `refit.timeout_s`."""
    engine_start_timeout_s: float = 3600.0
    """Seconds that an engine whose processes are up may take to start, at the start of a run or as a replacement,
    before it is treated as dead. Must be longer than the largest model takes to load, compile and capture."""
    collective_timeout_s: float = 1800.0
    """Seconds that the ranks of a model wait for each other in a collective before the run fails."""
    max_engine_restarts: int = 3
    """How many times in a run a dead engine is restarted while the others go on; the next death ends the run. If the
    replacement does not come up, it is started up to seven more times within two hours, which counts as one restart; at
    the start of a run each death counts. With 0, and always if the engine's machine is gone, the death is a failure of
    the whole run: see `max_restarts`."""
    max_restarts: int = 10
    """How many times a run resumes by itself from its last checkpoint after a rank, engine or machine fails. The next
    failure ends it, as do three in a row without a checkpoint between them; with 0, the first. A cluster of thousands
    of GPUs has a few failures a day, so more than ten should be looked at."""

    def sharing(self) -> frozenset[str]:
        """Roles that take turns on the same GPUs."""
        return frozenset(role for pool in self.pools.values() if pool.shared for role in pool.roles)
