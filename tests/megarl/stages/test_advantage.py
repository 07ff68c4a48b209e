"""From scored groups to the batches of an update."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trajectories import SHORT_RUN, group, group_of_scores, with_baseline

from converters.errors import UserError
from megarl.algorithms import PolicyObjective
from megarl.cluster.trainer.batch import Batch, sequences_of
from megarl.data import PromptGroup, Trajectory, Turn
from megarl.data.stretches import RunLengthArray
from megarl.diagnostics import advantage_metrics
from megarl.rewards import OVERLONG, Score
from megarl.schema import AlgorithmConfig, LoopConfig, MegarlConfig
from megarl.stages.advantage import kl_in_reward, kl_to_teachers, with_advantages
from megarl.stages.batch import (
    advantage_stretches,
    at_trained,
    at_trained_tokens,
    mini_batches,
    to_batch,
    trained_responses,
)
from megarl.stages.filtering import without_small_groups
from megatron_ext.packing.packing import RaggedBatch

FIRST = group(0, [9, 8], ([1, 2], 1.0), ([3], 0.0))
SECOND = group(1, [7], ([4, 5, 6], 0.0), ([1, 1], 2.0))
GROUPS = [FIRST, SECOND]


CONVERSATION = PromptGroup(
    FIRST.prompt,
    0,
    [
        Trajectory(
            (
                Turn.of([9, 8], [1, 2], [-0.1, -0.2], [3, 3], "stop"),
                Turn.of([5, 5], [3], [-0.3], [3], "stop"),
            ),
            "stop",
            Score(1.0, {}, {"score": 1.0}),
        ),
        *group(0, [9, 8], ([4], 0.0)).trajectories,
    ],
)
"""One trajectory of two turns, and one of a single turn."""


@dataclass
class Prepared:
    batches: list[RaggedBatch]
    advantages: Tensor
    kl: Tensor | None
    kl_to_teachers: float | None


def prepare(groups: Sequence[PromptGroup], kl_coefficient=0.0, fields=None, **algorithm) -> Prepared:
    if "advantage" not in algorithm:
        algorithm["advantage_options"] = {"normalize_by_std": False}
    config = MegarlConfig(rollout=SHORT_RUN, algorithm=AlgorithmConfig(**algorithm), loop=LoopConfig())
    kept = without_small_groups(groups, config.algorithm)
    batch = to_batch(kept, config.algorithm)
    batch = batch.with_fields(**{name: sequences_of(each, batch.lengths) for name, each in (fields or {}).items()})
    kl = kl_in_reward(batch, PolicyObjective(config.algorithm).with_kl_coefficient(kl_coefficient))
    batch = with_advantages(batch, kept, config, kl=kl, kl_coefficient=kl_coefficient)
    check_what_metrics_read(batch)
    batches = [each.load() for each in mini_batches(batch, kept, config)]
    return Prepared(batches, at_trained("advantages", batch), kl, kl_to_teachers(batch))


def check_what_metrics_read(batch: Batch) -> None:
    """Numbers of stretches of tokens are those of all tokens."""
    values = at_trained("advantages", batch).double()
    lengths = trained_responses(batch).lengths
    if not len(values):
        assert advantage_metrics(advantage_stretches(batch)) == {}
        return
    of_responses = [float(each.mean()) for each in values.split(lengths.tolist()) if len(each)]
    assert advantage_metrics(advantage_stretches(batch)) == pytest.approx(
        {
            "advantage/mean": float(values.mean()),
            "advantage/response_mean": sum(of_responses) / len(of_responses),
            "advantage/std": float(values.std(correction=0)),
            "advantage/max": float(values.max()),
            "advantage/min": float(values.min()),
            "advantage/positive_fraction": float((values > 0).double().mean()),
            "advantage/zero_fraction": float((values == 0).double().mean()),
        },
        abs=1e-12,
    )


def first(of: PromptGroup, count: int) -> PromptGroup:
    return of.with_members(of.trajectories[:count])


def test_batch_of_one_update() -> None:
    (batch,) = prepare(GROUPS).batches
    assert batch.tokens.tolist() == [9, 8, 1, 2, 9, 8, 3, 7, 4, 5, 6, 7, 1, 1]
    assert batch.lengths.tolist() == [4, 3, 4, 3]
    advantages = batch.fields["advantages"]
    assert advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5, 0, -1, -1, -1, 0, 1, 1]
    assert batch.fields["weights"].sum() == pytest.approx(1.0)
    assert (batch.fields["weights"] > 0).tolist() == (advantages != 0).tolist()
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, -0.5, -0.6, 0, -0.1, -0.1])
    torch.testing.assert_close(batch.fields["rollout_log_probs"], expected)
    assert "old_log_probs" not in batch.fields


def test_each_optimizer_step_has_weights_of_its_own_and_whole_prompts() -> None:
    first, second = prepare(GROUPS, updates_per_step=2).batches
    assert (first.lengths.tolist(), second.lengths.tolist()) == ([4, 3], [4, 3])
    assert first.fields["weights"].sum() == pytest.approx(1.0)
    assert second.fields["weights"].unique().tolist() == pytest.approx([0, 0.2])


def test_response_left_alone_by_a_dropped_reward_is_left_out() -> None:
    (batch,) = prepare([FIRST.with_members(FIRST.trajectories[1:]), SECOND]).batches
    assert batch.lengths.tolist() == [4, 3]


def test_nothing_to_compare_is_a_user_error() -> None:
    with pytest.raises(
        UserError, match=r"no prompt of this step has 2 responses to learn from: of the 2 that were scored 0"
    ):
        prepare([first(FIRST, 1), first(SECOND, 1)])


def test_same_prompt_twice_in_a_step_makes_two_groups() -> None:
    (batch,) = prepare([*GROUPS, group(2, [9, 8], ([5], 4.0), ([6], 6.0))]).batches
    # Rewards 4 and 6 are compared with each other, not with the 1 and 0 of the first time.
    assert batch.fields["advantages"][-6:].tolist() == [0, 0, -1, 0, 0, 1]
    assert batch.fields["advantages"][:4].tolist() == [0, 0, 0.5, 0.5]


def test_a_response_that_was_cut_counts_for_its_group_and_is_not_trained_on() -> None:
    cut = [FIRST, group(1, [7], ([4, 5, 6], 0.0), ([1, 1], 2.0, "length"))]
    (batch,) = prepare(cut, train_on_truncated_responses=False).batches
    assert batch.fields["advantages"].tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5, 0, -1, -1, -1, 0, 0, 0]
    assert batch.fields["weights"].tolist() == pytest.approx(
        [0, 0, *[1 / 6] * 2, 0, 0, 1 / 6, 0, *[1 / 6] * 3, 0, 0, 0]
    )


CUT = group(0, [9], ([1], 1.0), ([1, 2], 1.0), ([3], 0.0), ([3, 4, 5, 6], 0.0, "length"))


def test_what_is_trained_on_is_centred_where_cut_responses_leave_the_statistics_too() -> None:
    stay = prepare([CUT], train_on_truncated_responses=False)
    assert [float(each[0]) for each in stay.advantages.split([1, 2, 1])] == [0.5, 0.5, -0.5]
    leave = prepare([CUT], train_on_truncated_responses=False, truncated_responses_in_statistics=False)
    torch.testing.assert_close(leave.advantages, torch.tensor([1 / 3, 1 / 3, 1 / 3, -2 / 3]))
    with pytest.raises(
        UserError, match=r"of the 2 that were scored 1 were truncated .* raise rollout\.max_response_tokens"
    ):
        prepare(
            [CUT.with_members(CUT.trajectories[2:])],
            train_on_truncated_responses=False,
            truncated_responses_in_statistics=False,
        )


def test_a_mini_batch_of_cut_responses_alone_is_no_optimizer_step() -> None:
    cut = group(2, [7], ([1, 1], 1.0, "length"), ([1, 1], 0.0, "length"))
    prepared = prepare([FIRST, cut], updates_per_step=2, train_on_truncated_responses=False)
    (batch,) = prepared.batches
    assert batch.lengths.tolist() == [4, 3]
    assert float(batch.fields["weights"].sum()) == pytest.approx(1)
    with pytest.raises(UserError, match="no response of this step has a token to train on"):
        prepare([cut], train_on_truncated_responses=False)


def test_each_prompt_of_an_optimizer_step_counts_alike_in_the_mean_over_prompts() -> None:
    # Prompts of 3 and of 5 trained tokens.
    (both,) = prepare(GROUPS, aggregation="prompt_mean").batches
    assert both.fields["weights"].unique().tolist() == pytest.approx([0, 1 / 10, 1 / 6])
    apart = prepare(GROUPS, aggregation="prompt_mean", updates_per_step=2).batches
    assert [float(batch.fields["weights"].max()) for batch in apart] == pytest.approx([1 / 3, 1 / 5])


def test_a_teacher_adds_to_the_advantages_of_the_reward() -> None:
    old, teacher = torch.full((14,), -1.0), torch.full((14,), -1.0)
    teacher[2], teacher[12] = -0.5, -3.0
    fields = {"old_log_probs": old, "teacher_log_probs": teacher}
    prepared = prepare(GROUPS, fields=fields, distillation_coefficient=0.1)
    plain = prepare(GROUPS)
    added = prepared.batches[0].fields["advantages"] - plain.batches[0].fields["advantages"]
    assert added[[2, 12]].tolist() == pytest.approx([0.05, -0.2])
    assert int(added.count_nonzero()) == 2
    assert prepared.kl_to_teachers == pytest.approx((2.0 - 0.5) / 8)
    assert plain.kl_to_teachers is None
    alone = prepare(GROUPS, fields=fields, advantage="distillation")
    assert alone.kl_to_teachers == pytest.approx(-float(alone.advantages.mean()))


def test_a_penalty_of_length_has_the_weight_of_its_factor_in_gdpo() -> None:
    def prepared(factor: float) -> list[float]:
        terms = ((1.0, 0.0), (0.0, 0.0), (1.0, -0.05 * factor), (0.0, 0.0))
        scored = group_of_scores(
            0,
            *(
                Score(2 * right + penalty, {}, {"acc": right, "form": right, OVERLONG: penalty})
                for right, penalty in terms
            ),
        )
        return prepare([scored], advantage="gdpo", advantage_options={}).advantages.tolist()

    hard, soft, none = prepared(1.0), prepared(0.01), prepared(0.0)
    assert soft == pytest.approx(none, abs=2e-3)
    assert hard != pytest.approx(none, abs=1e-2)
    # A right answer a little too long stays far better than a wrong one.
    assert hard[2] > 0.5 > -0.5 > hard[1]


def test_the_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    old, reference = torch.zeros(14), torch.zeros(14)
    old[2], old[12] = 0.5, 0.25
    prepared = prepare(
        GROUPS,
        kl_coefficient=2.0,
        fields={"old_log_probs": old, "reference_log_probs": reference},
        kl_in="reward",
        kl_estimator="k1",
    )
    # Scores: 1 - 2 x 0.5 and 0; 0 and 2 - 2 x 0.25.
    assert prepared.batches[0].fields["advantages"][[2, 6, 8, 12]].tolist() == [0, 0, -0.75, 0.75]
    assert prepared.kl is not None
    assert float(prepared.kl.mean()) == pytest.approx(0.75 / 8)


@pytest.mark.parametrize("field", ["rollout_log_probs", "reference_log_probs", "old_log_probs"])
def test_a_prediction_that_is_no_number_is_named_by_its_response(field: str) -> None:
    values = torch.zeros(14)
    values[9] = float("nan")
    with pytest.raises(UserError, match=r"token 1 of response 2 of the step, to prompt 0 \(source\) is nan"):
        prepare(GROUPS, fields={field: values})
    # On a prompt it does not count.
    values[9], values[7] = 0.0, float("nan")
    prepare(GROUPS, fields={field: values})


def test_the_greedy_baseline_is_that_of_the_prompt() -> None:
    based = [*with_baseline([FIRST], 0.25), *with_baseline([SECOND], 0.5)]
    (batch,) = prepare(based, advantage="remax").batches
    assert batch.fields["advantages"][[2, 6, 8, 12]].tolist() == [0.75, -0.25, -0.5, 1.5]


def test_prime_needs_outcomes() -> None:
    with pytest.raises(UserError, match="outcomes between 0 and 1, but a reward is 2"):
        prepare(GROUPS, fields={"process_rewards": torch.zeros(14)}, advantage="prime")


def test_only_what_the_policy_sampled_in_a_conversation_is_trained_on() -> None:
    (batch,) = prepare([CONVERSATION, SECOND]).batches
    tokens = [9, 8, 1, 2, 5, 5, 3, 9, 8, 4, 7, 4, 5, 6, 7, 1, 1]
    assert batch.tokens.tolist() == tokens
    assert batch.lengths.tolist() == [7, 3, 4, 3]
    trained = [0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1]
    assert (batch.fields["weights"] > 0).int().tolist() == trained
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, 0, -0.3, 0, 0, -0.4, 0, -0.4, -0.5, -0.6, 0, -0.1, -0.1])
    torch.testing.assert_close(batch.fields["rollout_log_probs"], expected)


ALIKE = st.lists(st.tuples(st.integers(1, 3), st.lists(st.sampled_from([0.0, -0.0, 0.5]), max_size=4)), min_size=1)


@settings(max_examples=60)
@given(ALIKE)
def test_values_lie_at_their_tokens_and_are_read_again(sequences):
    prompts, values = zip(*sequences, strict=True)
    trained = [
        (RunLengthArray(np.array([False, True]), np.array([prompt, len(own)], dtype=np.int32)),)
        for prompt, own in zip(prompts, values, strict=True)
    ]
    lengths = np.array([prompt + len(own) for prompt, own in zip(prompts, values, strict=True)])
    batch = Batch(lengths, [(np.zeros(length, dtype=np.int32),) for length in lengths], {"trained": trained})
    assert trained_responses(batch).lengths.tolist() == [len(own) for own in values]
    flat = torch.tensor([value for own in values for value in own], dtype=torch.float32)
    batch = batch.with_fields(advantages=at_trained_tokens(flat, batch))
    dense = torch.cat([torch.tensor([0.0] * prompt + own) for prompt, own in zip(prompts, values, strict=True)])
    assert torch.equal(batch.values("advantages").view(torch.int32), dense.view(torch.int32))
    check_what_metrics_read(batch)


def test_the_numbers_of_different_advantages_take_no_memory_for_each_token():
    length, count = 50_000, 20
    trained = (RunLengthArray(np.array([True]), np.array([length], dtype=np.int32)),)
    advantages = [(np.arange(length, dtype=np.float32),) for _ in range(count)]
    tokens = [(np.zeros(length, dtype=np.int32),)] * count
    fields = {"trained": [trained] * count, "advantages": advantages}
    batch = Batch(np.full(count, length), tokens, fields)
    tracemalloc.start()
    assert advantage_metrics(advantage_stretches(batch))["advantage/max"] == length - 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 8 * length, "arrays over all tokens of the batch"
