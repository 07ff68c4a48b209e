"""The log-prob gap between engine and trainer with the engine's routing replayed, and without."""

from collections.abc import Mapping, Sequence

import torch

from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.data import PromptGroup, trajectories_of
from megarl.data.stretches import fetch_concatenated
from megarl.stages.staleness import has_tokens_of, is_of_version

_RESPONSES = 32
"""At most this many responses of a step are measured: each costs two more forward passes."""
_PASSES: Mapping[str, bool] = {"experts/gap_replayed": True, "experts/gap_own_routing": False}
"""Metric -> whether the engine's routing is replayed."""


def replay_gaps(
    batch: Batch, groups: Sequence[PromptGroup], policy: TrainerGroup, *, version: int, temperature: float
) -> dict[str, float]:
    """Mean |engine - trainer| log-prob of trained tokens under either routing; {} unless routing is replayed.

    The policy has the weights of `version`. Tokens sampled by older weights are left out, since there the difference
    includes how far the policy has moved. Measures at most `_RESPONSES` responses, spread evenly over the batch.
    """
    if "routed_experts" not in batch.fields:
        return {}
    trajectories = trajectories_of(groups)
    of_now = [place for place, each in enumerate(trajectories) if has_tokens_of(version, each.turns)]
    if not of_now:
        return {}
    chosen = of_now[:: -(-len(of_now) // _RESPONSES)]
    some = batch.select(chosen)
    is_own = torch.from_numpy(fetch_concatenated(is_of_version(version, trajectories[place].turns) for place in chosen))
    is_counted, sampled = some.values("trained") & is_own, some.values("rollout_log_probs")
    if not bool(is_counted.any()):
        return {}
    gaps = {}
    for name, replay in _PASSES.items():
        own = fetch_tensor(policy.log_probs(some, temperature=temperature, replay=replay))
        gaps[name] = float((own - sampled)[is_counted].abs().mean())
    return gaps
