"""How far engine and trainer are apart where the engine's routing is replayed, and how far they would be without."""

from collections.abc import Mapping

from megarl.cluster.trainer.batch import Batch, opened_values
from megarl.cluster.trainer.trainer_group import TrainerGroup

_RESPONSES = 32
"""Responses of a step that are looked at: each costs two more forward passes."""
_PASSES: Mapping[str, bool] = {"experts/gap_replayed": True, "experts/gap_own_routing": False}
"""Metric -> whether the trainer's tokens go to the engine's experts."""


def replay_gaps(batch: Batch, policy: TrainerGroup, *, temperature: float) -> dict[str, float]:
    """Mean |engine - trainer| log-prob of trained tokens by either routing; nothing where none is replayed.

    The policy has the weights that sampled. Some responses speak for all, from all over the batch.
    """
    if "routed_experts" not in batch.fields:
        return {}
    some = batch.select(range(0, len(batch), -(-len(batch) // _RESPONSES)))
    is_trained, sampled = some.values("trained"), some.values("rollout_log_probs")
    if not bool(is_trained.any()):
        return {}
    gaps = {}
    for name, replay in _PASSES.items():
        own = opened_values(policy.log_probs(some, temperature=temperature, replay=replay))
        gaps[name] = float((own - sampled)[is_trained].abs().mean())
    return gaps
