"""Reads from Megatron's options which router losses are wanted, without importing Megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from converters.errors import UserError

_TYPE, _BALANCE, _Z = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"
ROUTER_LOSS_OPTIONS = (_TYPE, _BALANCE, _Z)
"""The options of Megatron that say so."""
BALANCING = ("seq_aux_loss", "global_aux_loss")
"""Balancing losses that do not depend on how the batch is split."""


@dataclass(frozen=True)
class RouterLosses:
    """The coefficient of each router loss that is added to the objective, by name; see `router_losses`."""

    coefficients: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.coefficients)

    @property
    def needs_counts(self) -> bool:
        """Whether the choices of the whole batch must be known before its gradients are computed."""
        return "global_aux_loss" in self.coefficients

    @staticmethod
    def of(options: Mapping[str, Any]) -> "RouterLosses":
        """The losses that Megatron's `options` ask for.

        Raises UserError for a loss over a micro-batch, for negative coefficients, and if their number is not that of
        the types.
        """
        # Megatron's own default is aux_loss; here architectures set "none".
        types, given = _list(options.get(_TYPE) or "none"), _list(options.get(_BALANCE) or 0.0)
        if any(given) and len(types) != len(given):
            raise UserError(
                f"megatron.{_BALANCE}={options[_BALANCE]} has {len(given)} values for {len(types)} of megatron.{_TYPE}:"
                " give one for each"
            )
        wanted = dict(zip(types, given, strict=False)) if any(given) else {}
        wanted["z_loss"] = options.get(_Z) or 0.0
        for name, coefficient in wanted.items():
            if coefficient < 0:
                raise UserError(f"megatron.{_Z if name == 'z_loss' else _BALANCE}={coefficient} must not be negative")
            if coefficient and name not in ("z_loss", *BALANCING):
                raise UserError(
                    f"megatron.{_BALANCE}={coefficient} asks for {name}, which"
                    f" {_REASONS.get(name, 'is no loss')}: set megatron.{_TYPE} to global_aux_loss, the same over the"
                    " batch of an optimizer step, or to seq_aux_loss, over each sequence"
                )
        return RouterLosses({name: coefficient for name, coefficient in wanted.items() if coefficient})


_REASONS = {
    "aux_loss": "is over a micro-batch, so that its gradients would depend on how the batch was cut",
    "none": "balances nothing",
}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
