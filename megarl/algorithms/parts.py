"""Parts of an algorithm: looked up by name, with options that are the keyword-only parameters of their functions."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from converters.errors import UserError, did_you_mean
from megatron_ext.dataclass_fields import FieldType

Part = TypeVar("Part")


def lookup(registry: Mapping[str, Part], key: str, name: str) -> Part:
    """The part `name`, which the configuration gave as `key`.

    Raises UserError with the nearest name for one that is not in the registry.
    """
    if name in registry:
        return registry[name]
    raise UserError(
        f"{key}={name!r} is not known{did_you_mean(name, registry)}; it must be one of {', '.join(registry)}"
    )


def option_types(*functions: Callable[..., object]) -> dict[str, FieldType]:
    """Name -> type of the keyword-only parameters of `functions`."""
    parameters = (each for function in functions for each in inspect.signature(function).parameters.values())
    return {each.name: _field_type(each.annotation) for each in parameters if each.kind is each.KEYWORD_ONLY}


def option_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """Name -> default of the keyword-only parameters of `function`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def _field_type(annotation: Any) -> FieldType:
    kinds = get_args(annotation) or (annotation,)
    return FieldType(frozenset("None" if kind is type(None) else kind.__name__ for kind in kinds))


def check_options(options: Mapping[str, Any], known: Mapping[str, FieldType], key: str, part: str) -> None:
    """Raise UserError for one of the `options`, given as `key`, that `part` has not, or a value of another type.

    Example: check_options({"clip_hi": 0.3}, option_types(clipped), "algorithm.policy_loss_options", "policy_loss=clip")
    """
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f"{key}.{name} is no option of algorithm.{part}{did_you_mean(name, known)}; its options are "
                f"{', '.join(known) or 'none'}: leave it out (~{key}.{name} takes it from a preset)"
            )
        try:
            known[name].convert(value)
        except ValueError as error:
            raise UserError(f"{key}.{name}={value}: this option {error}") from error
