"""The objective of the critic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.metrics import Mean, Metrics
from megarl.algorithms.trained_tokens import check_tokens_finite, trained_tokens
from megatron_ext.packing.packing import MicroBatch

_LEAST_VARIANCE = 1e-12
"""In units of the mean square of the returns: a standard deviation of 1e-6 of their size, some steps of float32."""


@dataclass(frozen=True)
class ValueObjective:
    """loss = sum_t weight_t max((v_t - R_t)^2, (clamp(v_t, o_t - value_clip, o_t + value_clip) - R_t)^2) / 2.

    v is the critic's current value, o its value before the step's first update, R the return (the value clipping of PPO
    implementations, arXiv:2005.12729). Without `value_clip` the loss is half the squared error.
    """

    value_clip: float | None = 0.5

    def __call__(self, predictions: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Loss (a differentiable scalar) and metrics of one micro-batch; `predictions` are values [T'].

        Fields [T']: `returns`; `weights`, those of an aggregation over the global batch, 0 at tokens that are not
        trained on; `old_values`, only with a `value_clip`. Values at tokens that are not trained on, even NaN, have no
        effect. Raises UserError for the value of a trained token that is not finite.
        """
        places, responses, fields = trained_tokens(micro_batch)
        values, returns = predictions[places], fields["returns"]
        check_tokens_finite("critic's value", values.detach(), responses, micro_batch.names)
        squared = (values - returns).square()
        clipped = torch.zeros_like(squared)
        if self.value_clip is not None:
            old = fields["old_values"]
            bounded = values.clamp(old - self.value_clip, old + self.value_clip)
            clipped = (bounded - returns).square()
        loss = (fields["weights"] * (0.5 * torch.maximum(squared, clipped))).sum()
        values = values.detach()
        error = returns - values
        return loss, Metrics(
            sums={"value/loss": loss.detach()},
            means={
                "value/mean": Mean.of(values),
                "value/return_mean": Mean.of(returns),
                "value/clip_fraction": Mean.of((clipped > squared).float()),
                "value/explained_variance": Mean.of(
                    error, error.double().square(), returns, returns.double().square(), formula=explained_variance
                ),
            },
        )


def explained_variance(error: Tensor, error_square: Tensor, returns: Tensor, returns_square: Tensor) -> Tensor:
    """1 - Var(R - v) / Var(R) from four means: 1 for a perfect critic, 0 for one that predicts a constant.

    Returns that are all equal within the precision of float32 leave nothing to explain: that gives 0.
    """
    variance = returns_square - returns.square()
    ratio = (error_square - error.square()) / variance
    # Sums of float64 leave a variance of 1e-17 of equal returns, and the ratio to it would be the metric.
    varies = variance > _LEAST_VARIANCE * returns_square
    return torch.where(varies, 1 - ratio, torch.zeros_like(ratio))
