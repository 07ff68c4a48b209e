"""Processes of a run and the machines that they are on: the keys below `cluster`."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class PoolConfig:
    """Machines of the cluster, or a part of each, that some roles have for themselves."""

    roles: list[str] = MISSING
    """Who runs there: trainer, engine, critic, reward_model, implicit_reward_model, teacher_NAME."""
    nodes: int = MISSING
    """How many machines."""
    gpus: int | None = None
    """GPUs of each of these machines, with as large a part of its CPUs; null is the whole machine."""
    shared: bool = False
    """Trainer and engines, with what else is named, are on the same GPUs and take turns (`megarl train`)."""


@dataclass
class ClusterConfig:
    """Where the processes run."""

    trainer_ranks: int = 1
    """Megatron ranks: TP x CP x PP x DP. Experts (EP, ETP) are dealt over the same ranks."""
    address: str | None = None
    """Address of a running Ray cluster; without one, a cluster of this machine alone is started on loopback."""
    nodes: int | None = None
    """Machines that a run waits for before it starts or, where one was lost, goes on: with `address`, at most
    `start_timeout_s`. null takes those that are there."""
    rendezvous_port: int = 0
    """Port at which the policy's Megatron ranks meet; 0 takes one that is free, as every other model's ranks do."""
    object_store_bytes: int | None = None
    """Shared memory that a cluster of this machine alone may take for the data of steps, in bytes; what has no room
    there goes to disk. null is 30 % of the memory that is available, or half of what /dev/shm has free if that is less,
    256 MiB at least and 200 GB at most."""
    trainer_cpus: float = 1.0
    """CPU cores that Ray sets aside for each Megatron rank."""
    engine_cpus: float = 1.0
    """CPU cores that Ray sets aside for each engine."""
    gpu_share: float = 1.0
    """The part of a GPU that each Megatron rank and each engine asks for. Below 1 a rank and an engine can be on the
    same GPU: one rank, engines of one GPU, and rollout.engine_args.gpu_memory_utilization has to leave room."""
    engine_threads: int | None = None
    """Threads of each engine worker on a CPU: null is OMP_NUM_THREADS where the environment has it, else this machine's
    cores divided by the workers of all engines, since trainer ranks wait during a rollout, or in a cluster that
    `address` names `engine_cpus` divided by the engine's workers. Sampled tokens may depend on it."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Which roles have machines, or GPUs of them, for themselves; roles of no pool are placed on what is left."""
    device_memory_bytes: int | None = None
    """Without GPUs, the weights, gradients, optimizer states and caches that the processes of a shared pool may hold on
    a machine at a time, in bytes, as the memory of a GPU would limit them; null is no limit."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks and engines, such as those of NCCL and UCX. They win over the environment of
    the Ray nodes and over those that megarl sets: NCCL_IB_HCA="" leaves that to NCCL."""
    check_nodes: bool = True
    """In a cluster of several machines that `address` names, look at them before anything starts, as `megarl doctor
    --cluster` does, and do not start where one is slow, broken or other than the rest."""
    start_timeout_s: float = 300.0
    """How long ranks and engines may take to come up, in seconds, and how long room that others have is waited for."""
    silence_timeout_s: float = 600.0
    """How long a rank or an engine may give no sign of life, in seconds, before it is ended and treated as one that
    died. A process answers beside what it does, an engine that serves between two of its steps: this is longer than
    any step, and than an engine takes to give its memory to a trainer or to have it back. During a refit an engine is
    busy for as long as that lasts; see `refit.timeout_s`."""
    engine_start_timeout_s: float = 3600.0
    """How long an engine whose processes are up may take to start, in seconds, in a run's beginning or in place of one
    that died, before it is treated as one that died itself: longer than the largest model takes to load, compile and
    capture."""
    collective_timeout_s: float = 1800.0
    """How long the ranks of a model wait for one of them in a collective, in seconds, before that is a failure."""
    max_engine_restarts: int = 3
    """How many times in a run an engine that died is restarted, while the others go on; the next death ends the run.
    One that does not come back is started up to seven times more within two hours, which is one restart; in the
    beginning of a run each death is one. With 0 a death is a failure of the run as any other, and so is with any number
    that of an engine whose machine is gone: see `max_restarts`."""
    max_restarts: int = 10
    """How many times a run whose rank, engine or machine fails goes on by itself from its last checkpoint; the next
    failure ends it, as do three in a row without a checkpoint between them. A cluster of thousands of GPUs has a few
    failures a day, so more than ten want somebody who looks. 0: the first ends it."""

    def sharing(self) -> frozenset[str]:
        """The roles that take turns on the same GPUs."""
        return frozenset(role for pool in self.pools.values() if pool.shared for role in pool.roles)
