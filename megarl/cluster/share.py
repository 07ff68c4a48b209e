"""The part of a batch that goes to the ranks of one data-parallel share, as it travels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.packing import RaggedBatch

Array: TypeAlias = npt.NDArray[Any]
# To compare values by their bits: not a number is equal to itself, and 0 is not -0.
_BITS = {1: np.uint8, 4: np.uint32, 8: np.uint64}


class Runs(NamedTuple):
    """Values that repeat: each of `values` follows `lengths` times, int32.

    Example: Runs(np.array([0.0, 0.5]), np.array([2, 3])) is 0, 0, 0.5, 0.5, 0.5
    """

    values: Array
    lengths: Array


@dataclass(frozen=True)
class Share:
    """Sequences of a batch in the micro-batches in which the ranks of one data-parallel share compute them.

    Its arrays lie in the object store once, for all processes of a machine. Tokens are int32; a field that mostly
    repeats (a weight or an advantage of a whole response) is as long as it has different values.
    """

    tokens: Array
    lengths: Array
    fields: Mapping[str, Array | Runs]
    names: Mapping[str, Array]
    unit: int
    micro_batches: list[list[int]]
    """The sequences of each, by their places in the share."""

    @classmethod
    def of(cls, batch: RaggedBatch, cut: Sequence[Sequence[int]]) -> "Share":
        """The sequences of `batch` that `cut` names, by micro-batches."""
        places = count()
        chosen = batch.select(list(chain.from_iterable(cut)))
        return cls(
            tokens=chosen.tokens.to(torch.int32).numpy(),
            lengths=chosen.lengths.numpy(),
            fields={name: shortened(values.numpy()) for name, values in chosen.fields.items()},
            names={name: values.numpy() for name, values in chosen.names.items()},
            unit=batch.unit,
            micro_batches=[[next(places) for _ in micro_batch] for micro_batch in cut],
        )

    def batch(self) -> RaggedBatch:
        """The sequences, in tensors of this process."""
        return RaggedBatch(
            torch.tensor(self.tokens),
            torch.tensor(self.lengths),
            {name: torch.tensor(expanded(values)) for name, values in self.fields.items()},
            self.unit,
            {name: torch.tensor(values) for name, values in self.names.items()},
        )


def shortened(values: Array) -> Array | Runs:
    """The runs of equal `values` [T] where they are shorter than the values themselves."""
    bits = values.view(_BITS[values.itemsize])
    changes = bits[1:] != bits[:-1]
    run_bytes = values.itemsize + np.dtype(np.int32).itemsize
    if (np.count_nonzero(changes) + 1) * run_bytes >= values.nbytes:
        return values
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    return Runs(values[starts], np.diff(starts, append=len(values)).astype(np.int32))


def expanded(values: Array | Runs) -> Array:
    """The inverse of `shortened`."""
    return np.repeat(values.values, values.lengths) if isinstance(values, Runs) else values
