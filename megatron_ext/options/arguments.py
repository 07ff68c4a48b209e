"""Checks options, under Megatron's names, against the installed megatron-core, and parses them from flags."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any

from converters.errors import UserError, did_you_mean
from converters.layouts.parallel_sizes import ParallelSizes
from megatron_ext.options.dataclass_fields import DTYPES, FieldType, read_fields
from megatron_ext.options.supported_options import FULLY_SHARDED

CLASSES = {
    "transformer": ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
    "optimizer": ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    "distributed": ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
}

_INTEGER = FieldType(frozenset({"int"}))
_NUMBER = FieldType(frozenset({"float"}))
_BOOLEAN = FieldType(frozenset({"bool"}))
_OPTIONAL_INTEGER = FieldType(frozenset({"int", "None"}))
# The names are those of Megatron-LM's arguments; megatron-core's scheduler takes the values as plain arguments.
SCHEDULER_FIELDS = {
    "lr_warmup_init": _NUMBER,
    "lr_warmup_steps": _INTEGER,
    "lr_decay_steps": _OPTIONAL_INTEGER,
    "lr_decay_style": FieldType(choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")),
    "lr_wsd_decay_steps": _OPTIONAL_INTEGER,
    "lr_wsd_decay_style": FieldType(choices=("exponential", "linear", "cosine", "minus_sqrt")),
    "start_weight_decay": _NUMBER,
    "end_weight_decay": _NUMBER,
    "weight_decay_incr_style": FieldType(choices=("constant", "linear", "cosine")),
}
PARALLEL_FIELDS = tuple(field.name for field in dataclass_fields(ParallelSizes) if field.name != "world_size")


def fields_of_groups() -> dict[str, Mapping[str, FieldType]]:
    """Group -> name -> type, for the parallel sizes, three classes of megatron-core, and the scheduler."""
    classes = {group: read_fields(*where) for group, where in CLASSES.items()}
    parallel = {name: classes["transformer"].get(name, _OPTIONAL_INTEGER) for name in PARALLEL_FIELDS}
    parallel[FULLY_SHARDED] = _BOOLEAN
    transformer = {name: kind for name, kind in classes["transformer"].items() if name not in parallel}
    return {"parallel": parallel, **classes, "transformer": transformer, "scheduler": SCHEDULER_FIELDS}


def megatron_fields() -> dict[str, FieldType]:
    """Name -> type of every option of Megatron."""
    return {name: kind for fields in fields_of_groups().values() for name, kind in fields.items()}


def check_options(options: Mapping[str, Any], prefix: str = "megatron.") -> dict[str, Any]:
    """Convert `options` to the types of their fields.

    Raises UserError for a name that megatron-core does not have (with the nearest existing one), and for a value of
    another type; names in messages begin with `prefix`.
    """
    known = megatron_fields()
    checked = {}
    for name, value in options.items():
        if name not in known:
            advice = did_you_mean(name, known, f"{prefix}{{}}")
            raise UserError(f"{prefix}{name}: the installed megatron-core has no such option{advice}")
        try:
            checked[name] = known[name].convert(value)
        except ValueError as error:
            raise UserError(f"{prefix}{name}={value}: this option {error}") from error
    return checked


def split_options(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Checked options by group; one of several classes (`use_distributed_optimizer`) is in the group of each."""
    return {
        group: {name: _resolve(fields[name], value) for name, value in options.items() if name in fields}
        for group, fields in fields_of_groups().items()
    }


def _resolve(kind: FieldType, value: Any) -> Any:
    """Replace the name of a torch dtype or of an enum's member by the object; return other values as they are."""
    if "dtype" in kind.kinds and isinstance(value, str):
        return getattr(importlib.import_module("torch"), DTYPES[value])
    if kind.enum is None or "str" in kind.kinds or not isinstance(value, str):
        return value
    # Megatron compares enums with `==`: a name would silently compare unequal to every member.
    from megatron_ext import device

    device.install()
    module, name = kind.enum
    return getattr(importlib.import_module(module), name)[value]


def parse_flags(
    arguments: Sequence[str], hints: Mapping[str, str], own_options: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Parse flags in Megatron-LM's style; return the options, and the arguments that are not flags.

    `--tensor-model-parallel-size 8` (or `=8`) sets the field tensor_model_parallel_size; a boolean needs no value
    (`--sequence-parallel`, `--no-sequence-parallel`); a list takes the words up to the next flag or override. Values
    stay texts. `hints` maps names that Megatron does not have to what to use instead. `own_options` are the command's
    own options without dashes, to suggest for a misspelled flag.

    Raises UserError for an unknown flag, and for a flag without its value.
    """
    known = megatron_fields()
    options: dict[str, str] = {}
    others: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        switched_off = name.removeprefix("no_") if name.startswith("no_") and name not in known else None
        if switched_off in known and "bool" in known[switched_off].kinds and not equals:
            options[switched_off] = "false"
        elif name not in known:
            raise UserError(_unknown_flag(flag, name, [*known, *own_options], hints))
        else:
            options[name] = value if equals else _take_value(flag, known[name], words)
    return options, others


def _take_value(flag: str, kind: FieldType, words: list[str]) -> str:
    """Remove a flag's value from the front of `words`, and return it."""
    if "bool" in kind.kinds:
        return words.pop(0) if words and words[0].lower() in ("true", "false") else "true"
    values = list(_leading_values(words))
    if not values:
        raise UserError(f"{flag} needs a value: it takes {kind}")
    if "list" not in kind.kinds:
        return words.pop(0)
    del words[: len(values)]
    plain = values[0].startswith("[") or kind.kinds - {"list", "None"}
    return values[0] if len(values) == 1 and plain else f"[{','.join(values)}]"


def _leading_values(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--") or "=" in word:
            return
        yield word


def _unknown_flag(flag: str, name: str, known: Sequence[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return f"{flag} is not an option of megatron-core; {hints[name]}"
    flags = [known_name.replace("_", "-") for known_name in known]
    advice = did_you_mean(name.removeprefix("no_").replace("_", "-"), flags, "--{}")
    return f"{flag}: neither megarl nor the installed megatron-core has such an option{advice}"
