"""Which parts of an algorithm are refused, alone and together, and which cannot act."""

import re

import pytest
import torch

from converters.errors import UserError
from megarl.algorithms import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, PolicyObjective
from megarl.algorithms.policy_losses import PolicyLoss, TokenLoss
from megarl.algorithms.policy_losses.ratios import of_token
from megarl.algorithms.ragged import Ragged
from megarl.config.without_effect import without_effect
from megarl.schema import AlgorithmConfig, CorrectionConfig, MegarlConfig

TIS, BAND = CorrectionConfig("token_importance", None, 2.0), CorrectionConfig("token_band", 0.5, 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy_loss": "clipp"}, r"algorithm\.policy_loss='clipp' .* did you mean clip"),
        ({"kl_estimator": "k4"}, r"algorithm\.kl_estimator='k4' .* must be one of k1, k2"),
        ({"advantage": "grpoo"}, r"algorithm\.advantage='grpoo' .* did you mean grpo"),
        ({"aggregation": "token-mean"}, r"algorithm\.aggregation='token-mean' .* did you mean token_mean"),
        ({"corrections": [CorrectionConfig("icepopp", 0.5, 2.0)]}, r"'icepopp' .* did you mean icepop"),
        ({"kl_in": "both"}, r"algorithm\.kl_in='both' is not known: it must be loss or reward"),
        (
            {"policy_loss_options": {"clip_low": -0.2}},
            r"policy_loss_options\.clip_low must be above 0 and at most 1, not -0\.2",
        ),
        (
            {"policy_loss_options": {"clip_high": float("nan")}},
            r"policy_loss_options\.clip_high must be above 0, not nan",
        ),
        (
            {"policy_loss_options": {"clip_hi": 0.3}},
            r"clip_hi is no option of algorithm\.policy_loss=clip; did you mean clip_high",
        ),
        (
            {"policy_loss_options": {"clip_high": "wide"}},
            r"policy_loss_options\.clip_high=wide: this option takes float",
        ),
        ({"policy_loss_options": {"clip_high": None}}, r"clip_high=None: this option takes float"),
        (
            {"advantage_options": {"gamma": 1.0}},
            r"advantage_options\.gamma is no option of algorithm\.advantage=grpo; its options are normalize_by_std",
        ),
        ({"advantage_options": {"normalize_by_std": 2}}, r"normalize_by_std=2: this option takes bool"),
        ({"advantage": "gae", "advantage_options": {"gamma": 2}}, r"gamma must be at least 0 and at most 1, not 2"),
        (
            {"aggregation_options": {"length": 8}},
            r"length is no option of algorithm\.aggregation=token_mean; its options are none",
        ),
        (
            {"aggregation": "seq_mean_token_sum_norm", "aggregation_options": {"length": 0}},
            r"length must be at least 1",
        ),
        ({"policy_loss_options": {"dual_clip": 1.0}}, r"policy_loss_options\.dual_clip must be above 1"),
        (
            {"policy_loss": "sapo", "policy_loss_options": {"temperature_positive": 0.0}},
            r"policy_loss_options\.temperature_positive must be above 0",
        ),
        (
            {"policy_loss": "sapo", "policy_loss_options": {"temperature_negative": -1.0}},
            r"policy_loss_options\.temperature_negative must be above 0",
        ),
        (
            {"policy_loss": "dppo_tv", "policy_loss_options": {"ratio_cap": 0.0}},
            r"policy_loss_options\.ratio_cap must be above 0",
        ),
        (
            {"policy_loss": "kl_cov", "policy_loss_options": {"covariance_fraction": 1.5}},
            r"policy_loss_options\.covariance_fraction must be above 0 and at most 1",
        ),
        (
            {"policy_loss": "clip_cov", "policy_loss_options": {"covariance_low": 5.0}},
            r"policy_loss_options\.covariance_low=5\.0 must be below covariance_high=5\.0",
        ),
        (
            {"policy_loss": "kl_cov", "policy_loss_options": {"covariance_kl_coefficient": -1.0}},
            r"policy_loss_options\.covariance_kl_coefficient must be at least 0",
        ),
        ({"policy_loss": "sppo", "policy_loss_options": {"eta": 0.0}}, r"policy_loss_options\.eta must be above 0"),
        ({"kl_coefficient": -1.0}, r"algorithm\.kl_coefficient must be at least 0"),
        ({"kl_coefficient": 0.1, "kl_target": 0.0}, r"algorithm\.kl_target must be above 0"),
        ({"kl_horizon": 0}, r"algorithm\.kl_horizon must be above 0"),
        ({"entropy_coefficient": float("inf")}, r"algorithm\.entropy_coefficient must be a finite number"),
        ({"kl_target": 0.1}, r"algorithm\.kl_target=0\.1 multiplies algorithm\.kl_coefficient, which is 0"),
        (
            {"kl_estimator": "k1", "kl_coefficient": 0.1},
            r"kl_estimator=k1 with kl_in=loss .* kl_estimator=k1\+, .* kl_in=reward",
        ),
        ({"ratio_to": "reference"}, r"algorithm\.ratio_to='reference' is not known: it must be old or rollout"),
        ({"off_policy_mask": -0.1}, r"algorithm\.off_policy_mask must be at least 0"),
        ({"distillation_coefficient": float("inf")}, r"distillation_coefficient must be at least 0 and finite"),
        ({"kl_unbiased": True, "kl_coefficient": 0.1, "kl_estimator": "k3+"}, r"kl_unbiased .* kl_estimator=k3\+ is"),
        ({"kl_unbiased": True, "kl_coefficient": 0.1, "kl_in": "reward"}, r"kl_unbiased is of a KL in the loss"),
        ({"kl_unbiased": True}, r"kl_unbiased is of a KL in the loss, and there is none"),
        (
            {"updates_per_step": 2, "policy_loss": "policy_gradient"},
            r"policy_gradient, which has no ratio: from the sec",
        ),
        (
            {"updates_per_step": 2, "policy_loss": "policy_gradient", "ratio_to": "rollout", "corrections": [BAND]},
            r"policy_gradient, which has no ratio",
        ),
        ({"ratio_to": "interpolated"}, r"updates_per_step=1 that is the present one, exactly: set ratio_to=old"),
        ({"ratio_to": "rollout", "corrections": [TIS]}, r"token_importance, which would weigh by it once more"),
        ({"filter_low": 0.2}, r"nothing asks: set dynamic_sampling=true to replace .* or filter_groups=true"),
        (
            {"filter_groups": True, "filter_low": 0.8, "filter_high": 0.2},
            r"filter_low=0\.8 must be at most filter_high",
        ),
        ({"filter_groups": True, "dynamic_sampling": True}, r"set one of the two"),
        ({"truncated_responses_in_statistics": False}, r"set train_on_truncated_responses=false, too"),
        (
            {"train_on_truncated_responses": False, "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            r"advantage=grpo would compare .* without the KL .* set truncated_responses_in_statistics=false, or kl_in",
        ),
        (
            {"policy_loss": "cispo", "policy_loss_options": {"dual_clip": 3.0}},
            r"dual_clip is no option of algorithm\.policy_loss=cispo",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PolicyObjective(AlgorithmConfig(**fields))


@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "seq_mean_token_mean"])
@pytest.mark.parametrize("policy_loss", ["gspo", "gmpo", "sppo"])
def test_losses_of_responses_average_responses(policy_loss: str, aggregation: str) -> None:
    with pytest.raises(UserError, match=f"policy_loss={policy_loss} .* set aggregation=seq_mean_token_mean"):
        PolicyObjective(AlgorithmConfig(policy_loss=policy_loss, aggregation=aggregation))


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("policy_loss", ["gspo", "gmpo", "sppo"])
def test_losses_of_responses_take_corrections_of_responses_alone(policy_loss: str, kind: str) -> None:
    correction = CorrectionConfig(kind, 0.5 if CORRECTIONS[kind].takes_low else None, 2.0)
    config = AlgorithmConfig(policy_loss=policy_loss, aggregation="seq_mean_token_mean", corrections=[correction])
    if kind.startswith("sequence_"):
        PolicyObjective(config)
    else:
        with pytest.raises(UserError, match=f"corrections has the kind {kind}, .* use one of sequence_importance"):
            PolicyObjective(config)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_every_loss_goes_with_the_default_options(policy_loss: str) -> None:
    config = AlgorithmConfig(policy_loss=policy_loss, aggregation="seq_mean_token_mean")
    assert PolicyObjective(config).algorithm.policy_loss == policy_loss


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_kl_goes_into_the_reward(estimator: str) -> None:
    config = AlgorithmConfig(kl_estimator=estimator, kl_coefficient=0.1, kl_in="reward")
    assert PolicyObjective(config).needs_reference


@pytest.mark.parametrize(
    ("fields", "sense"),
    [
        ({"updates_per_step": 2, "policy_loss": "policy_gradient", "corrections": [TIS]}, {"ratio_to": "rollout"}),
        ({"ratio_to": "rollout", "corrections": [TIS]}, {"corrections": [BAND]}),
        ({"ratio_to": "interpolated", "corrections": [TIS]}, {"updates_per_step": 2}),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, {"kl_unbiased": True}),
        ({"filter_low": 0.2}, {"dynamic_sampling": True}),
    ],
)
def test_a_setting_that_gives_others_sense_is_taken_with_them(fields: dict, sense: dict) -> None:
    with pytest.raises(UserError):
        PolicyObjective(AlgorithmConfig(**fields))
    config = AlgorithmConfig(**{**fields, **sense})
    assert PolicyObjective(config).algorithm == config


def test_a_loss_that_names_what_there_is_not_is_refused_when_it_is_made() -> None:
    def surrogate(log_ratio: torch.Tensor, advantage: torch.Tensor, *, beta: float = 1.0) -> TokenLoss:
        return TokenLoss(-beta * advantage * log_ratio, {})

    with pytest.raises(
        TypeError, match=r"surrogate has a parameter advantage, .* did you mean advantages\?; inputs are"
    ):
        PolicyLoss(of_token, surrogate)

    def chosen(log_prob: torch.Tensor) -> torch.Tensor:
        return log_prob

    known = POLICY_LOSSES["clip"].surrogate
    for ratio, selection in ((chosen, None), (of_token, chosen)):
        with pytest.raises(TypeError, match=r"chosen has a parameter log_prob, .* did you mean log_probs\?"):
            PolicyLoss(ratio, known, selection=selection)


@pytest.mark.parametrize("name", [name for name, loss in POLICY_LOSSES.items() if not loss.needs_reference])
@pytest.mark.parametrize("several", [False, True])
def test_a_loss_acts_on_policy_exactly_where_it_says_so(name: str, several: bool) -> None:
    """Its gradient against that of the policy gradient, where every ratio is 1, and where none is."""
    log_probs = torch.linspace(-2, -0.1, 8, dtype=torch.float64)
    old = log_probs - (torch.tensor([0.5, -0.5] * 4) if several else 0)
    chosen = torch.tensor([True, False] * 4)

    def gradient(of: str) -> torch.Tensor:
        leaf = log_probs.clone().requires_grad_()
        advantages = torch.tensor([1.0] * 5 + [-1.0] * 3, dtype=torch.float64)
        inputs = {"log_probs": leaf, "old_log_probs": old, "advantages": advantages, "chosen": chosen}
        loss = POLICY_LOSSES[of]({**inputs, "responses": Ragged(torch.tensor([5, 3]))}, {}).loss
        return torch.autograd.grad(loss.sum(), leaf)[0]

    differs = not torch.allclose(gradient(name), gradient("policy_gradient"), atol=1e-12, rtol=0)
    assert differs == (POLICY_LOSSES[name].has_ratio if several else POLICY_LOSSES[name].acts_on_policy)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"policy_loss": "policy_gradient"}, None),
        ({"policy_loss": "clip_cov"}, None),
        ({"policy_loss": "cispo"}, r"policy_loss=cispo is the plain policy gradient here"),
        ({"policy_loss": "cispo", "updates_per_step": 2}, None),
        ({"policy_loss": "cispo", "ratio_to": "rollout"}, None),
        (
            {"policy_loss_options": {"clip_high": 0.28}},
            r"policy_loss_options\.clip_high never acts, since with algorithm\.updates_per_step=1",
        ),
        (
            {"policy_loss_options": {"clip_high": 0.28, "dual_clip": 3.0}},
            r"policy_loss_options\.clip_high, dual_clip never acts",
        ),
        ({"policy_loss_options": {"clip_high": 0.28}, "updates_per_step": 2}, None),
        ({"policy_loss_options": {"clip_high": 0.2}}, None),
    ],
)
def test_a_choice_that_cannot_act_is_said_in_one_sentence(fields: dict, said: str | None) -> None:
    sentences = without_effect(MegarlConfig(algorithm=AlgorithmConfig(**fields)))
    assert len(sentences) == (said is not None)
    assert said is None or re.search(said, sentences[0])
