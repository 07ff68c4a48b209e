"""The coefficient of the KL to the reference, fixed or adapted to a target."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converters.errors import UserError
from megarl.schema import AlgorithmConfig

_LARGEST_ERROR = 0.2


@dataclass
class AdaptiveKl:
    """Keeps the KL near `target`, in nats per token; without a target the coefficient is fixed.

    After every step coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(1, responses / horizon)
    (arXiv:1909.08593, section 2.2, with 0.1 as the last factor). Without the minimum, as in verl, a step of 5 x horizon
    responses could take the coefficient to 0, and a larger one below 0. `PolicyObjective.with_kl_coefficient` puts the
    coefficient of a step into the objective.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> "AdaptiveKl":
        """Build from `kl_coefficient`, `kl_target` and `kl_horizon`."""
        return cls(config.kl_coefficient, config.kl_target, config.kl_horizon)

    def update(self, kl: float, responses: int) -> None:
        """Adapt the coefficient to a step of `responses` responses with mean KL per token `kl`.

        Raises UserError for a KL that is not a finite number, unless the coefficient is fixed.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise UserError(
                f"the KL to the reference is {kl}, so algorithm.kl_coefficient cannot be adapted to kl_target: look "
                "for the step at which the log-probs went wrong, and lower megatron.lr"
            )
        error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coefficient *= 1 + error * min(1.0, responses / self.horizon)

    def state_dict(self) -> dict[str, float | None]:
        """State for a checkpoint."""
        return {"coefficient": self.coefficient, "target": self.target}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a coefficient that was adapted and is to be; otherwise the configured value stays."""
        # Checkpoints of earlier versions have no target.
        was_adapted = state.get("target", self.target) is not None
        if self.target is not None and was_adapted:
            self.coefficient = float(state["coefficient"])
