"""No cut of a step into micro-batches and ranks changes a loss, a gradient or a metric: every loss, every part."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_batches import random_batch, run, sequences

from megarl.algorithms import CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, PolicyObjective
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.packing.balance import assign


def corrections(names: list[str]) -> list[CorrectionConfig]:
    return [CorrectionConfig(name, 0.7 if CORRECTIONS[name].takes_low else None, 1.4) for name in names]


def aggregation_of(policy_loss: str) -> str:
    return "seq_mean_token_mean" if POLICY_LOSSES[policy_loss].of_response else "token_mean"


COVARIANCES = {"covariance_fraction": 0.3, "covariance_low": 0.0}


def everything(policy_loss: str, **fields) -> PolicyObjective:
    whole = POLICY_LOSSES[policy_loss].of_response
    chain = ["sequence_importance", "sequence_mean_band"] if whole else ["token_importance", "sequence_max_kl"]
    return PolicyObjective(
        AlgorithmConfig(
            policy_loss=policy_loss,
            aggregation=aggregation_of(policy_loss),
            kl_coefficient=0.1,
            entropy_coefficient=0.05,
            policy_loss_options={k: v for k, v in COVARIANCES.items() if k in POLICY_LOSSES[policy_loss].options},
            corrections=corrections(chain),
            **fields,
        )
    )


def assert_same_for_the_cut(objective: PolicyObjective, drawn, seed: int, aggregation: str, place: list[int]) -> None:
    batch, log_probs = random_batch(drawn, seed, aggregation)
    if objective.needs_selection:
        batch = batch.with_fields(chosen=objective.select(batch, log_probs, seed=(seed,)))
    cut = [[index for index in range(len(batch)) if place[index] == number] for number in range(4)]
    ranks = assign(batch.lengths, 2, int(batch.lengths.max()) + 3)
    whole_loss, whole_gradient, whole = run(objective, batch, log_probs, [list(range(len(batch)))])
    for micro_batches in (cut, [members for rank in ranks for members in rank]):
        loss, gradient, metrics = run(objective, batch, log_probs, micro_batches)
        torch.testing.assert_close(loss, whole_loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-9, atol=1e-9)
        assert metrics.values().keys() == whole.values().keys()
        for name, value in metrics.values().items():
            assert value == pytest.approx(whole.values()[name], rel=1e-6, abs=1e-9, nan_ok=True), name


places = st.lists(st.integers(0, 3), min_size=7, max_size=7)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@settings(max_examples=12)
@given(sequences, st.integers(0, 100), places)
def test_every_policy_loss(policy_loss: str, drawn, seed: int, place: list[int]) -> None:
    aggregation = aggregation_of(policy_loss)
    assert_same_for_the_cut(everything(policy_loss), drawn, seed, aggregation, place)


@settings(max_examples=12)
@given(sequences, st.integers(0, 100), places, st.sampled_from(sorted(AGGREGATIONS)))
def test_every_aggregation(drawn, seed: int, place: list[int], aggregation: str) -> None:
    assert_same_for_the_cut(everything("clip"), drawn, seed, aggregation, place)


@settings(max_examples=12)
@given(sequences, st.integers(0, 100), places, st.sampled_from(sorted(KL_ESTIMATORS)))
def test_every_kl_estimator(drawn, seed: int, place: list[int], estimator: str) -> None:
    # In the loss k1 is refused, as its gradient is noise; its metrics are the same in both places.
    objective = everything("clip", kl_estimator=estimator, kl_in="reward" if estimator == "k1" else "loss")
    assert_same_for_the_cut(objective, drawn, seed, "token_mean", place)


@pytest.mark.parametrize("policy_loss", ["clip", "gspo", "dppo_tv", "clip_cov"])
@settings(max_examples=6)
@given(sequences, st.integers(0, 100), places, st.sampled_from(["rollout", "interpolated"]))
def test_every_policy_loss_off_policy(policy_loss: str, drawn, seed: int, place: list[int], ratio_to: str) -> None:
    far = {"ratio_to": ratio_to, "updates_per_step": 2, "kl_unbiased": True, "off_policy_mask": 0.05}
    objective = PolicyObjective(replace(everything(policy_loss).algorithm, corrections=[], **far))
    assert_same_for_the_cut(objective, drawn, seed, aggregation_of(policy_loss), place)


@settings(max_examples=12)
@given(sequences, st.integers(0, 100), places, st.lists(st.sampled_from(sorted(CORRECTIONS)), min_size=1, max_size=3))
def test_every_chain_of_corrections(drawn, seed: int, place: list[int], names: list[str]) -> None:
    objective = PolicyObjective(replace(everything("clip").algorithm, corrections=corrections(names)))
    assert_same_for_the_cut(objective, drawn, seed, "seq_mean_token_sum", place)
