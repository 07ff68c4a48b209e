"""Every estimator against the outputs of verl 0.10.0.dev (core_algos.py, float32), compared under the mask.

reference/advantages.npz: inputs [24, 17] of four cases (plain; multiturn with holes in the mask; fullymasked, one
response without a trained token; singleton, one group of a single response), and advantages where the mask is 1.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import ADVANTAGES, estimate
from megarl.algorithms.ragged import Ragged

CASES = ("plain", "multiturn", "fullymasked", "singleton")

# verl's family and variant: ours, and its options.
VARIANTS: dict[str, tuple[str, dict[str, float | bool]]] = {
    "gae/g1.0_l1.0": ("gae", {}),
    "gae/g0.99_l0.95": ("gae", {"gamma": 0.99, "gae_lambda": 0.95}),
    "grpo/norm1": ("grpo", {}),
    "grpo/norm0": ("grpo", {"normalize_by_std": False}),
    "grpo_vectorized/norm1": ("grpo", {}),
    "grpo_vectorized/norm0": ("grpo", {"normalize_by_std": False}),
    "gdpo/norm1": ("gdpo", {}),
    "gdpo/norm0": ("gdpo", {"normalize_by_std": False}),
    "grpo_passk/norm1": ("grpo_pass_k", {}),
    "grpo_passk/norm0": ("grpo_pass_k", {"normalize_by_std": False}),
    "rloo": ("rloo", {}),
    "rloo_vectorized": ("rloo", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "reinforce_plus_plus/g1.0": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus/g0.99": ("reinforce_plus_plus", {"gamma": 0.99}),
    "remax": ("remax", {}),
    "optimal_token_baseline/is0": ("optimal_token_baseline", {}),
    "optimal_token_baseline/is1": ("optimal_token_baseline", {}),
    "tir_optimal_token_baseline/is0": ("optimal_token_baseline", {}),
    "tir_optimal_token_baseline/is1": ("optimal_token_baseline", {}),
}
SINGLETON = 100
"""The group of one, of the case singleton."""


@cache
def reference() -> dict[str, Tensor]:
    with np.load(Path(__file__).parent / "reference" / "advantages.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def inputs_of_verl(case: str, variant: str, *, reward_on_tokens: bool) -> tuple[dict[str, Any], Tensor]:
    """verl's inputs without what is masked, and without the group of one if it would be refused; its tokens [T]."""
    inputs = {name.split("/")[2]: v for name, v in reference().items() if name.startswith(f"{case}/in/")}
    groups, mask = inputs["index"].long(), inputs["response_mask"]
    kept = groups != SINGLETON
    if ADVANTAGES[VARIANTS[variant][0]].smallest_group == 1:
        kept[:] = True
    tokens = mask & kept[:, None]

    def of_tokens(name: str) -> Tensor:
        return inputs[name][tokens]

    # A reward behind the mask is one of the response, which has no token that could bear it.
    rewards = inputs["token_level_rewards"]
    on_tokens = rewards * mask if reward_on_tokens else torch.zeros_like(rewards)
    of_responses = (rewards - on_tokens).sum(1)[kept]
    result = {
        "responses": Ragged(tokens.sum(1)[kept]),
        "groups": groups[kept],
        "rewards": of_responses,
        "parts": {"only": rewards.sum(1)[kept]},
        "token_rewards": on_tokens[tokens] if reward_on_tokens else None,
        "values": of_tokens("values"),
        "baseline_rewards": inputs["reward_baselines"][kept],
        "old_log_probs": of_tokens("old_log_prob"),
        "probability_squares": of_tokens("sum_pi_squared"),
        "importance_weights": of_tokens("rollout_is_weights") if variant.endswith("is1") else None,
    }
    return result, kept[:, None].expand_as(mask)[mask]


def alpha_of_verl(case: str) -> float:
    """verl's factor of GPG: it counts the scores that are 0."""
    scores = reference()[f"{case}/in/token_level_rewards"].sum(1)
    return len(scores) / int(scores.count_nonzero())


def compared(case: str, variant: str, advantages: Tensor) -> Tensor:
    """Without a factor that depends on the group of one, or on how GPG counts."""
    if variant == "gpg":
        return advantages / advantages.abs().max()
    if case == "singleton" and VARIANTS[variant][0] in ("gdpo", "reinforce_plus_plus_baseline"):
        return (advantages - advantages.mean()) / advantages.std()
    return advantages


@pytest.mark.parametrize("reward_on_tokens", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_the_values_of_verl(case: str, variant: str, reward_on_tokens: bool) -> None:
    if case == "multiturn" and variant.startswith("optimal_token_baseline"):
        pytest.skip("it compares tokens at the same place of the padded row; ours is the multi-turn form")
    if case == "singleton" and variant.startswith("grpo_passk"):
        pytest.skip("it refuses the case, as we do")
    name, options = VARIANTS[variant]
    given, tokens = inputs_of_verl(case, variant, reward_on_tokens=reward_on_tokens)
    ours, returns = estimate(name, given, options)
    theirs = reference()[f"{case}/adv/{variant}/advantages"][tokens]
    torch.testing.assert_close(compared(case, variant, ours), compared(case, variant, theirs), rtol=1e-6, atol=1e-6)
    if returns is not None:
        expected = reference()[f"{case}/adv/{variant}/returns"][tokens]
        torch.testing.assert_close(returns, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_where_we_leave_verl_gpg_counts_the_responses_that_teach_nothing(case: str) -> None:
    given, tokens = inputs_of_verl(case, "gpg", reward_on_tokens=False)
    centred = estimate("grpo", given, {"normalize_by_std": False})[0]
    ours = estimate("gpg", given)[0]
    theirs = reference()[f"{case}/adv/gpg/advantages"][tokens]
    torch.testing.assert_close(theirs, alpha_of_verl(case) * centred, rtol=1e-6, atol=1e-6)
    rewards, groups = given["rewards"], given["groups"]
    by_group = [rewards[groups == group] for group in groups.unique()]
    teaching = sum(len(each) for each in by_group if len(each.unique()) > 1)
    torch.testing.assert_close(ours, len(rewards) / teaching * centred, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["is0", "is1"])
def test_where_holes_shift_the_padded_row_verls_token_baseline_is_another(variant: str) -> None:
    padded, multi_turn = (
        reference()[f"multiturn/adv/{form}optimal_token_baseline/{variant}/advantages"] for form in ("", "tir_")
    )
    assert (padded - multi_turn).abs().max() > 0.5


def test_where_verls_two_forms_of_rloo_contradict_each_other_we_refuse() -> None:
    case = {name: reference()[f"singleton/{name}"] for name in ("in/index", "in/response_mask", "adv/rloo/advantages")}
    alone = case["in/index"] == SINGLETON
    mask = case["in/response_mask"]
    its_tokens = alone[:, None].expand_as(mask)[mask]
    score = reference()["singleton/in/token_level_rewards"].sum(1)[alone]
    assert score != 0
    assert (case["adv/rloo/advantages"][its_tokens] == score).all()
    assert (reference()["singleton/adv/rloo_vectorized/advantages"][its_tokens] == 0).all()
    whole = {"responses": Ragged(mask.sum(1)), "groups": case["in/index"], "rewards": torch.zeros(len(mask))}
    with pytest.raises(UserError, match="rloo compares"):
        estimate("rloo", whole)
