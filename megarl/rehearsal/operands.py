"""Tensors among the arguments and results of torch's operators."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_of(each)
    elif isinstance(values, Mapping):
        yield from tensors_of(list(values.values()))


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensor arguments that an operator writes to."""
    if func._schema.is_mutable:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_of(args[number] if number < len(args) else kwargs.get(argument.name))
