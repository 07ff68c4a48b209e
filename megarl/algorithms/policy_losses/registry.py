"""The policy losses by name."""

from collections.abc import Mapping

from megarl.algorithms.policy_losses import covariance, ratios, surrogates
from megarl.algorithms.policy_losses.policy_loss import PolicyLoss

POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "clip": PolicyLoss(ratios.of_token, surrogates.clipped, clips_upward=True),
    "gspo": PolicyLoss(ratios.of_response, surrogates.clipped, of_response=True, clips_upward=True),
    "cispo": PolicyLoss(ratios.of_token, surrogates.clipped_likelihood),
    "gmpo": PolicyLoss(ratios.of_token, surrogates.geometric_mean, of_response=True, clips_upward=True),
    "sapo": PolicyLoss(ratios.of_token, surrogates.gated),
    "dppo_tv": PolicyLoss(ratios.of_token, surrogates.within_divergence(surrogates.total_variation)),
    "dppo_kl": PolicyLoss(ratios.of_token, surrogates.within_divergence(surrogates.binary_kl)),
    "clip_cov": PolicyLoss(
        ratios.of_token,
        surrogates.clip_cov_loss,
        acts_on_policy=True,
        clips_upward=True,
        selection=covariance.select_clip_cov,
    ),
    "kl_cov": PolicyLoss(ratios.of_token, surrogates.kl_cov_loss, selection=covariance.select_kl_cov),
    "policy_gradient": PolicyLoss(ratios.none, surrogates.likelihood),
    "dro": PolicyLoss(ratios.of_token, surrogates.regularised_likelihood),
    "sppo": PolicyLoss(
        ratios.of_response_to_reference,
        surrogates.squared_to_advantage,
        of_response=True,
        acts_on_policy=True,
    ),
}
