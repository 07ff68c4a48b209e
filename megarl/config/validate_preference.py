"""Checks the values of a configuration of `megarl dpo`, `megarl reward-model` and `megarl spin`."""

from converters.errors import UserError
from megarl.algorithms import PreferenceObjective
from megarl.config.validate import _check_files, _check_megatron, _check_values
from megarl.output.places import check_output
from megarl.schema import MegarlConfig

_AT_LEAST_ONE = ("steps", "pairs_per_step", "eval_every", "steps_per_generation")


def validate_preference(config: MegarlConfig) -> None:
    """Raise UserError for the first value with which none of the three commands could work."""
    _check_values(config)
    check_output(config)
    _check_megatron(config)
    for name in _AT_LEAST_ONE:
        value = getattr(config.preference, name)
        if value < 1:
            raise UserError(f"preference.{name}={value} is too small: it must be at least 1")
    PreferenceObjective(config.preference.beta, config.preference.label_smoothing)
    _check_files("preference.train_files", config.preference.train_files, needed=True)
    _check_files("preference.eval_files", config.preference.eval_files, needed=False)
