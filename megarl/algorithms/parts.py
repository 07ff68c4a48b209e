"""Parts of an algorithm: looked up by name, and called with the inputs that their parameters name.

Keyword-only parameters of a part are its options; all others are its inputs, required if they have no default.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

from converters.errors import UserError, did_you_mean
from megatron_ext.options.dataclass_fields import FieldType

Part = TypeVar("Part")


def lookup(registry: Mapping[str, Part], key: str, name: str) -> Part:
    """Return the part `name`, which the configuration gave as `key`.

    Raises UserError, suggesting the nearest name, if it is not in the registry.
    """
    if name in registry:
        return registry[name]
    raise UserError(
        f"{key}={name!r} is not known{did_you_mean(name, registry)}; it must be one of {', '.join(registry)}"
    )


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts (never NaN), and the words for them in messages.

    Example: the keyword-only parameter `clip_low: Share = 0.2` must be above 0 and at most 1.
    """

    holds: Callable[[float], bool]
    words: str


NOT_NEGATIVE = Range(lambda value: value >= 0, "at least 0")
ABOVE_ZERO = Range(lambda value: value > 0, "above 0")

NotNegative: TypeAlias = Annotated[float, NOT_NEGATIVE]
Positive: TypeAlias = Annotated[float, ABOVE_ZERO]
AboveOne: TypeAlias = Annotated[float, Range(lambda value: value > 1, "above 1")]
AtLeastOne: TypeAlias = Annotated[int, Range(lambda value: value >= 1, "at least 1")]
Share: TypeAlias = Annotated[float, Range(lambda value: 0 < value <= 1, "above 0 and at most 1")]
ZeroToOne: TypeAlias = Annotated[float, Range(lambda value: 0 <= value <= 1, "at least 0 and at most 1")]


@dataclass(frozen=True)
class Option:
    """Type and optional range of an option of a part."""

    type: FieldType
    range: Range | None = None


def options_of(*functions: Callable[..., object]) -> dict[str, Option]:
    """The keyword-only parameters of `functions`, by name."""
    parameters = (each for function in functions for each in inspect.signature(function).parameters.values())
    return {each.name: _option(each.annotation) for each in parameters if each.kind is each.KEYWORD_ONLY}


def option_defaults(function: Callable[..., object]) -> dict[str, Any]:
    """Name -> default of the keyword-only parameters of `function`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def inputs_of(*functions: Callable[..., object]) -> dict[str, bool]:
    """Name -> whether any of `functions` requires it, for all their inputs.

    Example: `def f(rewards, token_rewards=None, *, gamma=1.0)` has {"rewards": True, "token_rewards": False}.
    """
    found: dict[str, bool] = {}
    for function in functions:
        for each in inspect.signature(function).parameters.values():
            if each.kind is not each.KEYWORD_ONLY:
                found[each.name] = found.get(each.name, False) or each.default is each.empty
    return found


def check_inputs(function: Callable[..., object], known: Collection[str]) -> None:
    """Raise TypeError for an input of `function` that is not in `known`, since no caller would pass it."""
    for name in inputs_of(function):
        if name not in known:
            raise TypeError(
                f"{function.__qualname__} has a parameter {name}, which is no input here{did_you_mean(name, known)}; "
                f"inputs are {', '.join(known)}, and an option comes after a *"
            )


def call(function: Callable[..., Part], inputs: Mapping[str, Any], /, **options: Any) -> Part:
    """Call `function` with the `inputs` that its parameters name, and with its `options`.

    Raises KeyError if a required input is missing.
    """
    named = {name: inputs[name] for name, is_needed in inputs_of(function).items() if is_needed or name in inputs}
    return function(**named, **options)


def _option(annotation: Any) -> Option:
    kinds: list[str] = []
    within: Range | None = None
    for kind in (annotation,) if get_origin(annotation) in (None, Annotated) else get_args(annotation):
        if get_origin(kind) is Annotated:
            kind, within = get_args(kind)
        kinds.append("None" if kind is type(None) else kind.__name__)
    return Option(FieldType(frozenset(kinds)), within)


def check_options(options: Mapping[str, Any], known: Mapping[str, Option], key: str, part: str) -> None:
    """Raise UserError for an unknown option of `part`, or a value of the wrong type or out of range.

    Example: check_options({"clip_hi": 0.3}, options_of(clipped), "algorithm.policy_loss_options", "policy_loss=clip")
    """
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f"{key}.{name} is no option of algorithm.{part}{did_you_mean(name, known)}; its options are "
                f"{', '.join(known) or 'none'}: leave it out (~{key}.{name} takes it from a preset)"
            )
        try:
            known[name].type.convert(value)
        except ValueError as error:
            raise UserError(f"{key}.{name}={value}: this option {error}") from error
    for name, value in options.items():
        within = known[name].range
        if within is not None and value is not None and not within.holds(value):
            raise UserError(f"{key}.{name} must be {within.words}, not {value}")
