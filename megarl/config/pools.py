"""Checks the pools of a configuration, before the machines are known."""

from collections import Counter

from converters.errors import UserError, did_you_mean
from megarl.cluster.placement.roles import ENGINE, POLICY
from megarl.schema import MegarlConfig


def check_pools(config: MegarlConfig) -> None:
    """Raise UserError for a pool with unknown roles, or of an unknown kind."""
    pools = config.cluster.pools
    if pools and config.cluster.gpu_share < 1:
        raise UserError(
            f"cluster.gpu_share={config.cluster.gpu_share} puts a rank and an engine on one GPU, and in cluster.pools"
            " each has its own: leave one of the two out"
        )
    known = [POLICY, ENGINE, "critic", "reward_model", "implicit_reward_model"]
    known += [f"teacher_{name}" for name in config.teachers]
    for name, pool in pools.items():
        key = f"cluster.pools.{name}"
        for size, value in (("nodes", pool.nodes), ("gpus", pool.gpus)):
            if value is not None and value < 1:
                raise UserError(f"{key}.{size}={value} is too small: it must be at least 1")
        if not pool.roles:
            raise UserError(f"{key}.roles is empty: name those that have the pool, of {', '.join(known)}")
        if unknown := [role for role in pool.roles if role not in known]:
            raise UserError(
                f"{key}.roles has {unknown[0]}, which is none of {', '.join(known)}{did_you_mean(unknown[0], known)}"
            )
        if pool.shared and (missing := [role for role in (POLICY, ENGINE) if role not in pool.roles]):
            raise UserError(
                f"{key}.shared=true lets trainer and engines take turns, and {missing[0]} is not in {key}.roles: add"
                " it, or leave shared out"
            )
    named = Counter(role for pool in pools.values() for role in pool.roles)
    if twice := [role for role, count in named.items() if count > 1]:
        raise UserError(f"{twice[0]} is named {named[twice[0]]} times in cluster.pools: name each role once")
    _check_sharing(config)


def take_turns(config: MegarlConfig) -> bool:
    """Whether trainer and engines take turns on the same GPUs."""
    return {POLICY, ENGINE} <= config.cluster.sharing()


def refuse_turns(config: MegarlConfig) -> None:
    """Raise UserError for a pool whose roles would have to take turns, for commands that do not support it."""
    for name, pool in config.cluster.pools.items():
        if pool.shared:
            raise UserError(
                f"cluster.pools.{name}.shared=true is for megarl train: here trainer and engines work side by side;"
                " leave it out"
            )


def _check_sharing(config: MegarlConfig) -> None:
    cluster, sharing = config.cluster, config.cluster.sharing()
    if cluster.device_memory_bytes is not None and not sharing:
        raise UserError(
            "cluster.device_memory_bytes limits those that take turns, and no pool of cluster.pools has shared=true:"
            " leave it out"
        )
    if sharing and config.megatron.get("nccl_ub"):
        raise UserError(
            "megatron.nccl_ub=true registers the trainer's memory with NCCL, and in cluster.pools it goes to the host"
            " when the engines' turn comes: leave it out"
        )
    if sharing and config.rollout.engine_args.get("enable_sleep_mode") is False:
        raise UserError(
            "rollout.engine_args.enable_sleep_mode=false keeps the engines' memory from the trainer, with which they"
            " take turns in cluster.pools: leave it out"
        )
