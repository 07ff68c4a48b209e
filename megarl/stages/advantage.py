"""Scored trajectories to a training batch: advantages, weights, and the log-probs the loss compares with."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms import ADVANTAGES, AGGREGATIONS
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.schema import AlgorithmConfig
from megarl.data import Trajectory
from megatron_ext.packing import RaggedBatch


def advantage(
    trajectories: Sequence[Trajectory], trainer: TrainerGroup, config: AlgorithmConfig, *, temperature: float
) -> list[RaggedBatch]:
    """One batch per optimizer step, with the fields that `PolicyObjective` reads.

    The log-probs of the policy that sampled are computed only if there are several optimizer steps: in the first, the
    policy is still the one that sampled, and its own log-probs are the old ones.
    """
    trajectories = _in_company(trajectories)
    advantages = _advantages(trajectories, config)
    mini_batches = _mini_batches(trajectories, config.updates_per_step)
    batches = []
    for indices in mini_batches:
        batch = ragged_batch([trajectories[i] for i in indices], advantages[indices], config.aggregation)
        if config.updates_per_step > 1:
            old = trainer.log_probs(batch, temperature=temperature)
            batch = batch.with_fields(old_log_probs=old.log_probs)
        if config.kl_coefficient > 0:
            reference = trainer.log_probs(batch, temperature=temperature, reference=True)
            batch = batch.with_fields(reference_log_probs=reference.log_probs)
        batches.append(batch)
    return batches


def ragged_batch(trajectories: Sequence[Trajectory], advantages: Tensor, aggregation: str) -> RaggedBatch:
    """Prompts and responses end to end; every field is 0 on prompt tokens."""
    tokens, lengths, sampled, log_probs = [], [], [], []
    for trajectory in trajectories:
        prompt = len(trajectory.prompt.token_ids)
        tokens += [*trajectory.prompt.token_ids, *trajectory.token_ids]
        lengths.append(prompt + len(trajectory.token_ids))
        sampled += [False] * prompt + [True] * len(trajectory.token_ids)
        log_probs += [0.0] * prompt + list(trajectory.log_probs)
    mask = torch.tensor(sampled)
    response_lengths = torch.tensor([len(trajectory.token_ids) for trajectory in trajectories])

    def on_response(values: Tensor) -> Tensor:
        return torch.zeros(len(mask)).masked_scatter(mask, values.float())

    return RaggedBatch(
        tokens=torch.tensor(tokens),
        lengths=torch.tensor(lengths),
        fields={
            "rollout_log_probs": torch.tensor(log_probs),
            "advantages": on_response(advantages.repeat_interleave(response_lengths)),
            "weights": on_response(AGGREGATIONS[aggregation](response_lengths)),
        },
    )


def _in_company(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Without the responses that dropped rewards have left alone: there is nothing to compare them with."""
    sizes = Counter(trajectory.group for trajectory in trajectories)
    kept = [trajectory for trajectory in trajectories if sizes[trajectory.group] > 1]
    if not kept:
        raise UserError(
            "no two responses to one prompt are left in this step after dropping failed rewards: repair reward.function"
        )
    return kept


def _advantages(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> Tensor:
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories])
    groups = torch.tensor([trajectory.group for trajectory in trajectories])
    return ADVANTAGES[config.advantage](rewards, groups, normalize_by_std=config.normalize_by_std)


def _mini_batches(trajectories: Sequence[Trajectory], count: int) -> list[list[int]]:
    """Indices of the trajectories of each mini-batch: whole prompts, in order."""
    groups = list(dict.fromkeys(trajectory.group for trajectory in trajectories))
    place = {group: position * count // len(groups) for position, group in enumerate(groups)}
    batches: list[list[int]] = [[] for _ in range(count)]
    for index, trajectory in enumerate(trajectories):
        batches[place[trajectory.group]].append(index)
    return [batch for batch in batches if batch]
