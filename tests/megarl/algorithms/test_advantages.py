"""How an estimator is asked, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages import ADVANTAGES, INPUTS, Estimator, Source, estimate
from megarl.algorithms.parts import inputs_of
from megarl.algorithms.ragged import Ragged
from megarl.stages.fields import FIELDS

NAN, INFINITY = float("nan"), float("inf")
OF_GROUPS = [name for name, estimator in ADVANTAGES.items() if estimator.smallest_group > 1]


def complete() -> dict[str, Any]:
    """Three responses to the prompts 4 and 9, of 2, 0 and 3 tokens, with all there is to know of them."""
    tokens = torch.tensor([0.5, 0.25, 0.125, 0.5, 0.75])
    rewards = torch.tensor([1.0, 0.0, 0.5])
    return {
        "responses": Ragged(torch.tensor([2, 0, 3])),
        "groups": torch.tensor([4, 4, 4]),
        "rewards": rewards,
        "parts": {"format": rewards, "answer": rewards.flip(0)},
        "token_rewards": tokens,
        "values": tokens,
        "baseline_rewards": rewards,
        "old_log_probs": -tokens,
        "probability_squares": tokens,
        "importance_weights": tokens,
        "process_rewards": tokens,
        "teacher_log_probs": -tokens,
    }


def without(inputs: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: values for name, values in inputs.items() if name not in fields}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"algorithm\.advantage='rlo' .* did you mean rloo"):
        estimate("rlo", complete())


def test_the_options_of_the_configuration_arrive() -> None:
    assert list(ADVANTAGES["gae"].options) == ["gamma", "gae_lambda"]
    scored = complete()
    halved = estimate("gae", scored, {"gamma": 0.5, "gae_lambda": 0.0})[1]
    assert halved is not None
    # The reward of the last token; before it, the token's reward and half the next value.
    assert halved.tolist() == [0.5 + 0.5 * 0.25, 0.25 + 1.0, 0.125 + 0.5 * 0.5, 0.5 + 0.5 * 0.75, 0.75 + 0.5]


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, estimator in ADVANTAGES.items() for field in sorted(estimator.needs)]
)
def test_what_an_estimator_needs_and_does_not_get_is_refused(name: str, field: str) -> None:
    for missing in ({**complete(), field: {} if field == "parts" else None}, without(complete(), field)):
        with pytest.raises(UserError, match=rf"algorithm\.advantage={name} needs .*, which this run does not have"):
            estimate(name, missing)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_but_what_it_needs_is_missed(name: str) -> None:
    every = complete()
    needed = {field: every[field] for field in ("responses", "groups", "rewards", *ADVANTAGES[name].needs)}
    assert len(estimate(name, needed)[0]) == 5


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_of_one_is_refused_where_responses_are_compared(name: str) -> None:
    alone = {**complete(), "groups": torch.tensor([4, 4, 9])}
    with pytest.raises(UserError, match=rf"{name} compares .* only one response: raise loop\.samples_per_prompt"):
        estimate(name, alone)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in OF_GROUPS])
def test_a_group_of_one_is_like_any_other_where_they_are_not(name: str) -> None:
    alone = {**complete(), "groups": torch.tensor([4, 9, 5])}
    assert bool(estimate(name, alone)[0].isfinite().all())


def test_the_only_response_to_a_prompt_has_no_token_baseline() -> None:
    alone = {**complete(), "groups": torch.tensor([4, 9, 5]), "token_rewards": None}
    assert estimate("optimal_token_baseline", alone)[0].tolist() == [1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_a_batch_without_a_token_is_refused(lengths: list[int]) -> None:
    count = len(lengths)
    empty = {
        "responses": Ragged(torch.tensor(lengths, dtype=torch.long)),
        "groups": torch.zeros(count, dtype=torch.long),
        "rewards": torch.zeros(count),
    }
    with pytest.raises(UserError, match="no response of this step has a token"):
        estimate("grpo", empty)


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_a_reward_that_is_no_number_is_refused_by_name(bad: float) -> None:
    scored = {**complete(), "rewards": torch.tensor([1.0, bad, bad])}
    with pytest.raises(UserError, match=f"the reward of response 1 to prompt 4 is {bad}, not a finite number"):
        estimate("grpo", scored)
    with pytest.raises(UserError, match="the reward of sample 31 of gsm8k"):
        estimate("grpo", scored, describe=lambda i: f"sample {30 + i} of gsm8k")


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("token_rewards", "reward"),
        ("values", "value"),
        ("old_log_probs", "log-prob"),
        ("probability_squares", "sum of squared probabilities"),
        ("importance_weights", "importance weight"),
        ("process_rewards", "process reward"),
        ("teacher_log_probs", "teacher's log-prob"),
    ],
)
def test_a_value_of_a_token_that_is_no_number_is_refused_by_its_place(field: str, what: str) -> None:
    scored = {**complete(), field: torch.tensor([0.0, 0.0, 0.0, NAN, INFINITY])}
    with pytest.raises(UserError, match=f"the {what} of token 1 of response 2 to prompt 4 is nan"):
        estimate("grpo", scored)


def test_a_greedy_reward_and_a_part_that_are_no_numbers_are_refused() -> None:
    bad = torch.tensor([0.0, 0.0, NAN])
    with pytest.raises(UserError, match="the reward of the greedy response of response 2 to prompt 4 is nan"):
        estimate("remax", {**complete(), "baseline_rewards": bad})
    with pytest.raises(UserError, match="the reward 'answer' of response 2 to prompt 4 is nan"):
        estimate("gdpo", {**complete(), "parts": {"format": torch.zeros(3), "answer": bad}})


def test_max_rl_of_negative_rewards_is_refused() -> None:
    with pytest.raises(UserError, match=r"max_rl needs rewards of at least 0, but there is one of -0\.5"):
        estimate("max_rl", {**complete(), "token_rewards": None, "rewards": torch.tensor([1.0, -0.5, 0.0])})


def test_max_rl_of_a_group_without_success_learns_nothing() -> None:
    failed = {**complete(), "token_rewards": None, "rewards": torch.zeros(3)}
    assert estimate("max_rl", failed)[0].tolist() == [0.0] * 5


@pytest.mark.parametrize(("weight", "sign"), [(3.0, -1.0), (0.1, 1.0), (0.0, 1.0), (-1.0, 1.0)])
def test_gdpo_weighs_a_reward_after_normalising_it(weight: float, sign: float) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5])
    # Bare, the parts are each other's opposites; whitening leaves the sign of the heavier one.
    parts = {"a": rewards, "b": weight * rewards.flip(0)}
    scored = {**complete(), "parts": parts, "part_weights": {"b": weight}}
    only = {**complete(), "parts": {"a": rewards}}
    expected = sign * estimate("gdpo", only)[0]
    torch.testing.assert_close(estimate("gdpo", scored)[0], expected, rtol=1e-5, atol=1e-6)


def test_an_estimator_says_what_it_reads() -> None:
    def function(
        scores: Tensor, values: Tensor, teacher_log_probs: Tensor | None = None, *, gamma: float, clip_low: float
    ) -> Tensor:
        raise NotImplementedError

    estimator = Estimator(function)
    assert list(estimator.options) == ["gamma", "clip_low"]
    assert estimator.needs == {"values"}
    assert estimator.sources == {Source.CRITIC}


def test_an_estimator_that_names_what_there_is_not_is_refused_when_it_is_made() -> None:
    def function(score: Tensor) -> Tensor:
        return score

    with pytest.raises(TypeError, match=r"function has a parameter score, .* did you mean scores\?; inputs are"):
        Estimator(function)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_of_tokens_reach_the_estimators_that_say_so(name: str) -> None:
    scored = {**complete(), "responses": Ragged(torch.tensor([2, 1, 2]))}
    with_kl = {**scored, "token_rewards": torch.tensor([0.1, 0.0, 0.0, 0.8, 0.1])}
    change = estimate(name, with_kl)[0] - estimate(name, without(scored, "token_rewards"))[0]
    assert bool((change.abs() > 1e-6).any()) == ADVANTAGES[name].reads_token_rewards


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_leaves_what_it_is_given_as_it_is(name: str) -> None:
    scored, as_it_was = complete(), complete()
    estimate(name, scored)
    for field, before in as_it_was.items():
        assert not isinstance(before, Tensor) or torch.equal(scored[field], before), field


def test_every_input_is_read_and_every_source_needed() -> None:
    assert {need for each in ADVANTAGES.values() for need in each.needs} == {
        name for name, each in INPUTS.items() if each.source
    }
    read = {name for each in ADVANTAGES.values() for name in inputs_of(each.function)}
    assert set(INPUTS) - read == {"groups"}, "what `prompts` are made of"
    assert {each.batch_field for each in INPUTS.values()} - {None} <= {field.name for field in FIELDS}
