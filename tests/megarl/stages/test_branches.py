"""Branches of one rollout count once: in the statistics of a group, and in the loss."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import SHORT_RUN, group, trajectory

from converters.errors import UserError
from megarl.data import PromptGroup
from megarl.diagnostics import group_metrics
from megarl.schema import AlgorithmConfig, MegarlConfig
from megarl.stages.advantage import with_advantages
from megarl.stages.batch import mini_batches, to_batch
from megarl.stages.filtering import without_small_groups
from megatron_ext.packing.packing import RaggedBatch

Branch = tuple[int, float]
"""Tokens and reward."""
Rollouts = Sequence[Sequence[Branch]]


def grouped(ordinal: int, rollouts: Rollouts) -> PromptGroup:
    members = [
        replace(trajectory([9], [1] * tokens, reward), rollout=number)
        for number, branches in enumerate(rollouts)
        for tokens, reward in branches
    ]
    return group(ordinal, [9]).with_members(members)


def batch_of(groups: Sequence[PromptGroup], **algorithm) -> RaggedBatch:
    """The batch of one optimizer step, with advantages and weights."""
    config = MegarlConfig(rollout=SHORT_RUN, algorithm=AlgorithmConfig(**algorithm))
    kept = without_small_groups(groups, config.algorithm)
    batch = with_advantages(to_batch(kept, config.algorithm), kept, config, kl=None, kl_coefficient=0.0)
    (batch,) = mini_batches(batch, kept, config)
    return batch.load()


def per_branch(batch: RaggedBatch, field: str) -> list[float]:
    """The value of each branch's tokens, which all have the same."""
    of_sequences = batch.fields[field].split(batch.lengths.tolist())
    return [float(each[1]) for each in of_sequences if len(set(each[1:].tolist())) == 1]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def grpo_by_loops(groups: Sequence[Rollouts]) -> list[float]:
    """GRPO over rollouts, whose reward is the mean of their branches."""
    advantages = []
    for rollouts in groups:
        rewards = [mean([reward for _, reward in branches]) for branches in rollouts]
        centre = mean(rewards)
        std = (sum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
        for branches, reward in zip(rollouts, rewards, strict=True):
            advantages += [(reward - centre) / (std + 1e-6)] * len(branches)
    return advantages


def weights_by_loops(groups: Sequence[Rollouts], aggregation: str) -> list[float]:
    rollouts, weights = [branches for each in groups for branches in each], []
    for each in groups:
        of_prompt = sum(tokens for branches in each for tokens, _ in branches)
        for branches in each:
            tokens = sum(tokens for tokens, _ in branches)
            weight = {
                "seq_mean_token_mean": 1 / (len(rollouts) * tokens),
                "seq_mean_token_sum": 1 / len(rollouts),
                "prompt_mean": 1 / (len(groups) * of_prompt),
            }[aggregation]
            weights += [weight] * len(branches)
    return weights


branches = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3).map(float)), min_size=1, max_size=3)
steps = st.lists(st.lists(branches, min_size=2, max_size=3), min_size=1, max_size=3)


@given(steps)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_statistics_and_weights_are_those_of_loops_over_rollouts(step) -> None:
    groups = [grouped(ordinal, rollouts) for ordinal, rollouts in enumerate(step)]
    assert per_branch(batch_of(groups), "advantages") == pytest.approx(grpo_by_loops(step), rel=1e-4, abs=1e-4)
    for aggregation in ("seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        found = per_branch(batch_of(groups, aggregation=aggregation), "weights")
        assert found == pytest.approx(weights_by_loops(step, aggregation))


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "max_rl", "grpo_pass_k", "win_rate"])
def test_a_rollout_in_three_branches_changes_no_other(advantage) -> None:
    """As one trajectory of the same tokens and reward."""
    whole = batch_of([grouped(0, [[(3, 1.0)], [(1, 0.0)], [(2, 0.0)]])], advantage=advantage)
    cut = batch_of([grouped(0, [[(1, 1.0)] * 3, [(1, 0.0)], [(2, 0.0)]])], advantage=advantage)
    for field in ("advantages", "weights"):
        trained = [batch.fields[field][batch.fields["trained"]] for batch in (whole, cut)]
        torch.testing.assert_close(*trained)


def test_branches_are_no_group_by_themselves() -> None:
    alone = grouped(0, [[(1, 1.0), (1, 0.0)]])
    with pytest.raises(UserError, match="no prompt of this step has 2 responses"):
        batch_of([alone])
    assert alone.rewards == [0.5]
    assert group_metrics([alone.rewards])["groups/no_signal"] == 1


def test_branches_apart_and_what_cannot_take_them_are_refused() -> None:
    members = [replace(trajectory([9], [1], 1.0), rollout=number) for number in (0, 1, 0)]
    with pytest.raises(ValueError, match=r"no neighbours: rollouts \[0, 1, 0\]"):
        group(0, [9]).with_members(members)
    with pytest.raises(UserError, match="rollouts of this step have several branches"):
        batch_of([grouped(0, [[(1, 1.0), (1, 0.0)], [(1, 0.0)]])], advantage="prime")
