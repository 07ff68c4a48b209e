"""Surrogates: the loss of each token, given its log-ratio and advantage A. r = exp(log-ratio), sg = stop gradient.

For losses of the form -A sg[w] log pi (weighted log-likelihood) only the gradient, a weighted policy gradient, has a
meaning; the value has none.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megarl.algorithms.parts import AboveOne, NotNegative, Positive, Share
from megarl.algorithms.policy_losses.policy_loss import TokenLoss
from megarl.algorithms.policy_losses.ratios import bounded_exp
from megarl.algorithms.ragged import Ragged


def clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: Positive = 0.2,
    dual_clip: AboveOne | None = None,
) -> TokenLoss:
    """max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)); with `dual_clip` c, where A < 0, at most -A c.

    PPO (arXiv:1707.06347, equation 7) with separate bounds as in DAPO (arXiv:2503.14476, equation 8). The dual clip
    (arXiv:1912.09729) is off by default, since it is in neither paper. Metrics: 1 for tokens whose gradient a bound
    cuts off, else 0.
    """
    ratio = bounded_exp(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = _clip_metrics(ratio > 1 + clip_high, ratio < 1 - clip_low, advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
        metrics["policy/clip_fraction_dual"] = ((advantages < 0) & (ratio > dual_clip)).float()
    return TokenLoss(loss, metrics)


def geometric_mean(
    log_ratio: Tensor, advantages: Tensor, responses: Ragged, *, clip_low: Share = 0.2, clip_high: Positive = 0.2
) -> TokenLoss:
    """-A exp(mean_t l_t), l_t = s min(s log r_t, s clamp(log r_t, -clip_low, clip_high)), s the sign of A.

    GMPO (arXiv:2507.20673): the geometric mean over the response of ratios that are clipped token by token. Here it is
    the loss of each token of the response, and the aggregation seq_mean_token_mean makes that the paper's mean over
    responses. verl averages over all rows of a micro-batch, including empty ones, so its loss depends on how the batch
    was split.
    """
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    ratio = responses.spread(bounded_exp(responses.mean(bounded.double()))).to(bounded.dtype)
    metrics = _clip_metrics(log_ratio > clip_high, log_ratio < -clip_low, advantages)
    return TokenLoss(-advantages * ratio, metrics)


def likelihood(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A sg[r] log pi: the policy gradient (Williams 1992), importance-weighted if the ratio is not 1."""
    return _weighted_likelihood(bounded_exp(log_ratio), log_probs, advantages, {})


def clipped_likelihood(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, clip_low: Share = 0.2, clip_high: Positive = 0.2
) -> TokenLoss:
    """-A sg[clamp(r, 1 - clip_low, 1 + clip_high)] log pi: CISPO (arXiv:2506.13585, equation 4).

    Tokens beyond the bounds keep a gradient with a clamped weight. Metrics: 1 for tokens whose weight is clamped.
    """
    ratio = bounded_exp(log_ratio)
    metrics = _clip_metrics(ratio > 1 + clip_high, ratio < 1 - clip_low, None)
    return _weighted_likelihood(ratio.clamp(1 - clip_low, 1 + clip_high), log_probs, advantages, metrics)


def gated(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: Positive = 1.0,
    temperature_negative: Positive = 1.05,
) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), with tau by the sign of A: SAPO (arXiv:2511.20347).

    A smooth gate instead of a clip. verl always aggregates this loss with seq_mean_token_mean; here the configuration
    chooses the aggregation.
    """
    temperature = torch.full_like(advantages, temperature_negative)
    temperature = temperature.masked_fill(advantages > 0, temperature_positive)
    gate = torch.sigmoid(temperature * (bounded_exp(log_ratio) - 1)) * 4 / temperature
    return TokenLoss(-advantages * gate, {})


def within_divergence(divergence: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., TokenLoss]:
    """-A sg[min(r, ratio_cap)] log pi at the tokens within a trust region: DPPO (arXiv:2602.04879).

    `divergence` compares the old and the current policy, each reduced to a binary choice between the token and all
    others. A token is outside the region, and has no loss, if the divergence exceeds `clip_high` with A > 0 and a
    probability that has risen, or `clip_low` with A <= 0 and one that has fallen. The paper centers the region on the
    policy that sampled (ratio_to=rollout), and recommends a large cap, since a small one biases the gradient (section
    5.4). Metrics: 1 for tokens outside the region, and for tokens whose ratio was capped.
    """

    def surrogate(
        log_ratio: Tensor,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        *,
        clip_low: Share = 0.2,
        clip_high: Positive = 0.2,
        ratio_cap: Positive = 20.0,
    ) -> TokenLoss:
        present, positive = log_probs.detach(), advantages > 0
        distance = divergence(present, old_log_probs)
        above = positive & (present > old_log_probs) & (distance > clip_high)
        below = ~positive & (present < old_log_probs) & (distance > clip_low)
        ratio = bounded_exp(log_ratio)
        metrics = _clip_metrics(above, below, None)
        metrics["policy/ratio_capped"] = (ratio > ratio_cap).float()
        weight = ratio.clamp(max=ratio_cap).masked_fill(above | below, 0)
        return _weighted_likelihood(weight, log_probs, advantages, metrics)

    return surrogate


def total_variation(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """|p - p_old| [T]: total variation of the binary choice between a token with probability p and all others."""
    return (log_probs.exp() - old_log_probs.exp()).abs()


def binary_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old || current) [T] of the binary choice between a token and all others, in nats."""
    # 1e-8 keeps the result finite at probability 1; verl's value.
    other, old_other = (-values.expm1() + 1e-8 for values in (log_probs, old_log_probs))
    old = old_log_probs.exp()
    return old * (old_log_probs - log_probs) + (1 - old) * (old_other / other).log()


def clip_cov_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    chosen: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: Positive = 0.2,
    dual_clip: AboveOne | None = None,
) -> TokenLoss:
    """`clipped`, with no loss at the chosen tokens: Clip-Cov (arXiv:2505.22617, equation 12)."""
    result = clipped(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    metrics = {**result.metrics, "policy/chosen_fraction": chosen.float()}
    return TokenLoss(result.loss.masked_fill(chosen, 0), metrics)


def kl_cov_loss(
    log_ratio: Tensor, advantages: Tensor, chosen: Tensor, *, covariance_kl_coefficient: NotNegative = 1.0
) -> TokenLoss:
    """-A r, plus covariance_kl_coefficient |log r| at the chosen tokens: KL-Cov (arXiv:2505.22617, equation 14)."""
    held = covariance_kl_coefficient * log_ratio.abs() * chosen
    return TokenLoss(-advantages * bounded_exp(log_ratio) + held, {"policy/chosen_fraction": chosen.float()})


def squared_to_advantage(log_ratio: Tensor, advantages: Tensor, *, eta: Positive = 1.0) -> TokenLoss:
    """(log r - eta A)^2 with one ratio per response: SPPO (arXiv:2405.00675, section 4).

    r is the probability of the whole response over that under the earlier policy that sampled it; A is its win rate
    against that policy's responses, minus 1/2. The gradient vanishes once log pi(response) has moved by eta A.
    """
    return TokenLoss((log_ratio - eta * advantages).square(), {})


def regularised_likelihood(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, beta: Positive = 0.1
) -> TokenLoss:
    """-A log pi + beta / 2 (log r)^2: DRO's quadratic penalty in place of a clip (arXiv:2405.19107), per token."""
    return TokenLoss(-advantages * log_probs + 0.5 * beta * log_ratio.square(), {})


def _weighted_likelihood(
    weight: Tensor, log_probs: Tensor, advantages: Tensor, metrics: Mapping[str, Tensor]
) -> TokenLoss:
    return TokenLoss(-advantages * weight.detach() * log_probs, metrics)


def _clip_metrics(above: Tensor, below: Tensor, advantages: Tensor | None) -> dict[str, Tensor]:
    """1 for tokens beyond a bound; given advantages, only if the advantage pushes the token further out."""
    if advantages is not None:
        above, below = above & (advantages > 0), below & (advantages < 0)
    return {
        "policy/clip_fraction": (above | below).float(),
        "policy/clip_fraction_high": above.float(),
        "policy/clip_fraction_low": below.float(),
    }
