import statistics

import pytest
import reference_values as verl
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.algorithms.advantages import ScoredResponses, estimate
from megarl.algorithms.ragged import Ragged
from megarl.config.schema import AlgorithmConfig


def grpo(rewards: torch.Tensor, groups: torch.Tensor, *, normalize_by_std: bool) -> torch.Tensor:
    scored = ScoredResponses(Ragged(torch.ones_like(groups)), groups, rewards)
    return estimate("grpo", scored, AlgorithmConfig(normalize_by_std=normalize_by_std)).advantages


rewards_in_groups = st.dictionaries(
    st.integers(-5, 1000), st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=5), min_size=1, max_size=5
)


@pytest.mark.parametrize(("normalize_by_std", "expected"), [(True, verl.GRPO_NORMALIZED), (False, verl.GRPO_CENTRED)])
def test_the_values_of_verl(normalize_by_std: bool, expected: torch.Tensor) -> None:
    actual = grpo(verl.REWARDS, verl.GROUPS, normalize_by_std=normalize_by_std)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@given(rewards_in_groups, st.booleans(), st.randoms(use_true_random=False))
def test_the_formula_whatever_the_order_of_the_responses(by_group, normalize_by_std, random) -> None:
    expected = []
    for group, rewards in by_group.items():
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        expected += [(group, r, (r - mean) / (std + 1e-6 if normalize_by_std else 1)) for r in rewards]
    random.shuffle(expected)
    groups, rewards, advantages = zip(*expected, strict=True)
    actual = grpo(torch.tensor(rewards), torch.tensor(groups), normalize_by_std=normalize_by_std)
    torch.testing.assert_close(actual, torch.tensor(advantages), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_equal_rewards_have_no_advantage_at_all(size: int) -> None:
    advantages = grpo(torch.full((size,), 0.1), torch.zeros(size, dtype=torch.long), normalize_by_std=True)
    assert advantages.tolist() == [0.0] * size


def test_a_group_of_one_is_refused_with_an_explanation() -> None:
    with pytest.raises(UserError, match=r"only one response: raise loop\.samples_per_prompt"):
        grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 1, 0]), normalize_by_std=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(UserError, match=f"the reward of response 1 to prompt 0 is {bad}, not a finite"):
        grpo(torch.tensor([1.0, bad]), torch.tensor([0, 0]), normalize_by_std=True)
