"""Corrections for the mismatch between the log-probs of engine and trainer: a per-token factor on any policy loss.

A correction is a statistic of r = pi_old / pi_rollout, per token or per response, and a rule that turns it into a
factor. Several corrections are multiplied; the product [T] has no gradient. Masks (0 or 1) and importance weights
combine: the weight `token_importance` with the mask `sequence_kl` is what papers call TIS with rejection.

A masked token still counts in the denominators of the loss (verl removes it from them): otherwise they would depend on
the current policy and on the whole batch. For the same reason, weights are not normalized to mean 1 over the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.kl import LARGEST_LOG_RATIO, k2, k3
from megarl.algorithms.metrics import Mean, Metrics
from megarl.algorithms.parts import lookup
from megarl.algorithms.ragged import Ragged
from megarl.schema import CorrectionConfig

Statistic = Callable[[Tensor, Ragged], Tensor]
"""(log-ratios [T], responses) to the quantity that the bounds apply to, at every token [T]."""
Rule = Callable[[Tensor, float, float], Tensor]
"""(statistic [T], lower bound, upper bound) to the factor [T]."""


def token_ratio(log_ratio: Tensor, ragged: Ragged) -> Tensor:  # noqa: ARG001
    """r of every token."""
    return bounded_ratio(log_ratio)


def sequence_ratio(log_ratio: Tensor, ragged: Ragged) -> Tensor:
    """The product of r over the response."""
    return ragged.spread(bounded_ratio(ragged.sum(log_ratio)))


def sequence_mean_ratio(log_ratio: Tensor, ragged: Ragged) -> Tensor:
    """The geometric mean of r over the response."""
    return ragged.spread(bounded_ratio(ragged.mean(log_ratio)))


def divergence(
    estimator: Callable[[Tensor, Tensor], Tensor], reduce: Callable[[Ragged, Tensor], Tensor] | None
) -> Statistic:
    """Build a statistic that estimates KL(rollout || old): per token, or with `reduce` over the response."""

    def statistic(log_ratio: Tensor, ragged: Ragged) -> Tensor:
        values = estimator(torch.zeros_like(log_ratio), log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        return values if reduce is None else ragged.spread(reduce(ragged, values))

    return statistic


def largest_of_response(ragged: Ragged, values: Tensor) -> Tensor:
    """Maximum over each response of values [T] >= 0: [N], 0 for a response without tokens."""
    responses = ragged.spread(torch.arange(len(ragged), device=values.device))
    return values.new_zeros(len(ragged)).scatter_reduce(0, responses, values, "amax")


def truncate(statistic: Tensor, low: float, high: float) -> Tensor:
    """Clamp the statistic to [low, high]: truncated importance sampling."""
    return statistic.clamp(low, high)


def inside(statistic: Tensor, low: float, high: float) -> Tensor:
    """1 where low <= statistic <= high, else 0; NaN stays NaN, so that it shows in the loss."""
    kept = ((statistic >= low) & (statistic <= high)).to(statistic.dtype)
    return torch.where(statistic.isnan(), statistic, kept)


def weight_inside(statistic: Tensor, low: float, high: float) -> Tensor:
    """The statistic itself where low <= statistic <= high, else 0."""
    return statistic * inside(statistic, low, high)


@dataclass(frozen=True)
class Correction:
    """A statistic, a rule, and the bounds that the rule takes."""

    statistic: Statistic
    rule: Rule
    of_token: bool = False
    """Whether tokens of one response may get different factors."""
    weighs: bool = False
    """Whether the factor is an importance weight; if not, it is a mask of 0 and 1."""
    needs_low: bool = False
    takes_low: bool = True


def _importance(statistic: Statistic, of_token: bool = False) -> Correction:
    return Correction(statistic, truncate, of_token, weighs=True)


def _band(statistic: Statistic, of_token: bool = False) -> Correction:
    return Correction(statistic, inside, of_token, needs_low=True)


def _at_most(statistic: Statistic, of_token: bool = False) -> Correction:
    return Correction(statistic, inside, of_token, takes_low=False)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped to [exp(-20), exp(20)]."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def check_correction(config: CorrectionConfig) -> None:
    """Raise UserError for an unknown kind, a missing or superfluous bound, and wrong bounds.

    Bounds are right if 0 <= low <= high, and `high` is finite and above 0.
    """
    correction = lookup(CORRECTIONS, "algorithm.corrections: kind", config.kind)
    where = f"algorithm.corrections: kind={config.kind}"
    if config.high is None:
        raise UserError(f"{where} needs a bound `high`: set it")
    if config.low is None and correction.needs_low:
        raise UserError(f"{where} needs a bound `low` beside `high`: set it, at most 1")
    if config.low is not None and not correction.takes_low:
        raise UserError(f"{where} has no lower bound, but low={config.low} is set: leave it out")
    if not (math.isfinite(config.high) and config.high > 0 and 0 <= (config.low or 0.0) <= config.high):
        raise UserError(f"{where} has low={config.low} and high={config.high}: they must satisfy 0 <= low <= high")


def correction_factor(configs: Sequence[CorrectionConfig], log_ratio: Tensor, ragged: Ragged) -> Tensor:
    """Multiply the factors of all `configs`: [T], without gradient; 1 if there are none.

    `log_ratio` [T] is log(pi_old / pi_rollout) of the responses' trained tokens.
    """
    # float64 keeps the precision of sums of log-ratios over thousands of tokens.
    exact = log_ratio.detach().double()
    factor = torch.ones_like(exact)
    for config in configs:
        correction = CORRECTIONS[config.kind]
        assert config.high is not None
        low = -math.inf if config.low is None else config.low
        factor = factor * correction.rule(correction.statistic(exact, ragged), low, config.high)
    return factor.to(log_ratio.dtype)


def off_policy_sequence_mask(log_ratio: Tensor, advantages: Tensor, ragged: Ragged, limit: float) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask: 1 at the tokens that are kept, else 0; [T], without gradient.

    A token is masked if its advantage is negative and the mean of log(pi_rollout / pi) over its response is above
    `limit` (arXiv:2512.02556, section 3.1): mistakes that the current policy would hardly make teach it little, and
    their gradient is unbounded. `log_ratio` [T] is log(pi / pi_rollout) of the trained tokens with the current policy
    pi, so it includes both staleness and the numerical mismatch between engine and trainer.
    """
    distance = ragged.spread(-ragged.mean(log_ratio.detach().double()))
    gone = (advantages < 0) & (distance > limit)
    return torch.where(distance.isnan(), distance, (~gone).double()).to(log_ratio.dtype)


def correction_metrics(factor: Tensor, ragged: Ragged) -> Metrics:
    """Metrics of a correction factor [T].

    The mean factor, the share of tokens that are masked, the share of responses that are masked entirely, and the
    effective sample size as a share of the tokens, (sum w)^2 / (T sum w^2).
    """
    left = ragged.sum((factor != 0).float())[ragged.lengths > 0]
    return Metrics(
        means={
            "correction/factor_mean": Mean.of(factor),
            "correction/masked_tokens": Mean.of((factor == 0).float()),
            "correction/masked_responses": Mean.of((left == 0).float()),
            "correction/effective_sample_size": effective_sample_size(factor),
        }
    )


def effective_sample_size(weights: Tensor) -> Mean:
    """(sum w)^2 / (n sum w^2) of weights [n], as a share of n; 0 if all weights are 0."""
    return Mean.of(weights, weights.double().square(), formula=_effective_share)


def _effective_share(mean: Tensor, mean_square: Tensor) -> Tensor:
    return torch.where(mean_square > 0, mean.square() / mean_square, mean_square)


CORRECTIONS: Mapping[str, Correction] = {
    "token_importance": _importance(token_ratio, of_token=True),
    "sequence_importance": _importance(sequence_ratio),
    "sequence_mean_importance": _importance(sequence_mean_ratio),
    "icepop": Correction(token_ratio, weight_inside, of_token=True, weighs=True, needs_low=True),
    "token_band": _band(token_ratio, of_token=True),
    "sequence_band": _band(sequence_ratio),
    "sequence_mean_band": _band(sequence_mean_ratio),
    "token_kl": _at_most(divergence(k3, None), of_token=True),
    "sequence_kl": _at_most(divergence(k3, Ragged.mean)),
    "sequence_sum_kl": _at_most(divergence(k3, Ragged.sum)),
    "sequence_max_kl": _at_most(divergence(k3, largest_of_response)),
    "token_square": _at_most(divergence(k2, None), of_token=True),
    "sequence_square": _at_most(divergence(k2, Ragged.mean)),
    "sequence_sum_square": _at_most(divergence(k2, Ragged.sum)),
    "sequence_max_square": _at_most(divergence(k2, largest_of_response)),
}
"""Corrections by name, with their bounds:

- token_importance, sequence_importance, sequence_mean_importance: r, or its product or its geometric mean over the
  response, at most `high` and, if given, at least `low` (truncated importance sampling, TIS);
- icepop: r where it is in [low, high], else 0 (IcePop, arXiv:2510.18855);
- token_band, sequence_band, sequence_mean_band: 1 where r, its product or its geometric mean over the response is in
  [low, high], else 0;
- token_kl, sequence_kl, sequence_sum_kl, sequence_max_kl: 1 where the k3 estimate of KL(rollout || old) of the token,
  or its mean, sum or maximum over the response, is at most `high`, else 0;
- token_square, sequence_square, sequence_sum_square, sequence_max_square: the same with (log r)^2 / 2.
"""
