"""Which parts of an algorithm are refused, alone and together."""

import pytest

from converters.errors import UserError
from megarl.algorithms import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, PolicyObjective
from megarl.config.algorithm import AlgorithmConfig, CorrectionConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy_loss": "clipp"}, r"algorithm\.policy_loss='clipp' .* did you mean 'clip'"),
        ({"kl_estimator": "k4"}, r"algorithm\.kl_estimator='k4' .* must be one of k1, k2"),
        ({"advantage": "grpoo"}, r"algorithm\.advantage='grpoo' .* did you mean 'grpo'"),
        ({"aggregation": "token-mean"}, r"algorithm\.aggregation='token-mean' .* did you mean 'token_mean'"),
        ({"corrections": [CorrectionConfig("icepopp", 0.5, 2.0)]}, r"'icepopp' .* did you mean 'icepop'"),
        ({"kl_in": "both"}, r"algorithm\.kl_in='both' is not known: it must be loss or reward"),
        ({"clip_low": -0.2}, r"algorithm\.clip_low must be at least 0, not -0\.2"),
        ({"clip_high": float("nan")}, r"algorithm\.clip_high must be at least 0, not nan"),
        ({"dual_clip": 1.0}, r"algorithm\.dual_clip must be above 1"),
        ({"sapo_temperature_positive": 0.0}, r"algorithm\.sapo_temperature_positive must be above 0"),
        ({"sapo_temperature_negative": -1.0}, r"algorithm\.sapo_temperature_negative must be above 0"),
        ({"ratio_cap": 0.0}, r"algorithm\.ratio_cap must be above 0"),
        ({"covariance_fraction": 1.5}, r"algorithm\.covariance_fraction must be above 0 and at most 1"),
        ({"covariance_low": 5.0}, r"algorithm\.covariance_low=5\.0 must be below covariance_high=5\.0"),
        ({"covariance_kl_coefficient": -1.0}, r"algorithm\.covariance_kl_coefficient must be at least 0"),
        ({"sppo_eta": 0.0}, r"algorithm\.sppo_eta must be above 0"),
        ({"kl_coefficient": -1.0}, r"algorithm\.kl_coefficient must be at least 0"),
        ({"kl_coefficient": 0.1, "kl_target": 0.0}, r"algorithm\.kl_target must be above 0"),
        ({"kl_horizon": 0}, r"algorithm\.kl_horizon must be above 0"),
        ({"entropy_coefficient": float("inf")}, r"algorithm\.entropy_coefficient must be a finite number"),
        ({"kl_target": 0.1}, r"algorithm\.kl_target=0\.1 multiplies algorithm\.kl_coefficient, which is 0"),
        (
            {"kl_estimator": "k1", "kl_coefficient": 0.1},
            r"kl_estimator=k1 with kl_in=loss .* kl_estimator=k1\+, .* kl_in=reward",
        ),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, r"dual_clip=3\.0 has no meaning with policy_loss=cispo"),
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
