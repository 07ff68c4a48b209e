"""A batch as the controller holds it and as ranks receive it: lengths, and the location of each sequence's values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.data.packed_stretches import Packed, packed, unpacked
from megarl.data.stretches import (
    Array,
    Values,
    fetch_concatenated,
    fetch_each,
    no_values_like,
    put_sequences,
    run_length_encoded,
)
from megatron_ext.packing.packing import RaggedBatch
from megatron_ext.packing.prefix_tree import Prefixes

ROUTED_EXPERTS = "routed_experts"
"""The field whose values are records of bytes, `RaggedBatch.routed_experts`."""
REFERENCE = "reference_"
"""Prefix of the reference model's predictions."""


@dataclass(frozen=True)
class Placed:
    """Where the tokens of N sequences were before they were placed in one array per share, and the share of each.

    Known only in this process; not sent along.
    """

    before: Sequence[Values]
    share: Array
    """int64[N]"""

    def suits(self, shares: Sequence[Sequence[int]]) -> bool:
        """Whether each of these shares, which may be another model's, is in a single array."""
        arrays = [set(self.share[list(sequences)].tolist()) for sequences in shares if sequences]
        return len(set().union(*arrays)) == len(arrays) == sum(map(len, arrays))


@dataclass(frozen=True)
class Batch:
    """N sequences of different lengths, with their values here or in the object store.

    `tokens` (int32) and each of `fields` have one entry per sequence; a batch without sequences has one empty entry,
    for its dtype. `lengths`, `unit` and `names` are those of the `RaggedBatch` that `load` makes in the process that
    computes.

    Example: Batch(np.array([3]), [(np.array([5]), np.array([9, 2]))], {"weights": [(np.float32([0, 0.5, 0.5]),)]})
    """

    lengths: Array
    tokens: Sequence[Values]
    fields: Mapping[str, Sequence[Values]] = field(default_factory=dict)
    unit: int = 1
    names: Mapping[str, Array] = field(default_factory=dict)
    prefixes: Prefixes | None = None
    """Shared prefixes of the sequences, if known."""
    mini_batch_of_sequence: Array | None = None
    """int64[N], the optimizer step of each sequence; None if there is only one."""
    placed: Placed | None = None
    """Set if the tokens are in one array per share of a model."""

    @classmethod
    def of(cls, batch: RaggedBatch) -> "Batch":
        """Make a batch from one whose values are all in this process."""
        lengths = batch.lengths.numpy()
        fields = {name: sequences_of(values, lengths) for name, values in batch.fields.items()}
        if batch.routed_experts is not None:
            fields[ROUTED_EXPERTS] = [tuple(each) for each in batch.routed_experts] or [(np.empty(0, np.void),)]
        tokens = [(each,) for each in _pieces(batch.tokens.to(torch.int32), lengths)]
        return cls(lengths, tokens, fields, batch.unit, {name: each.numpy() for name, each in batch.names.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: packed(values) for name, values in self.fields.items()}
        described = self.lengths, packed(self.tokens), fields, self.unit, self.names, self.prefixes
        return _unpacked_batch, (*described, self.mini_batch_of_sequence)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        """T: the tokens of all sequences."""
        return int(self.lengths.sum())

    def select(self, sequences: Sequence[int]) -> "Batch":
        """The given sequences, in the given order."""
        chosen = np.asarray(sequences, dtype=np.int64)

        def take(values: Sequence[Values]) -> list[Values]:
            return [values[sequence] for sequence in chosen.tolist()] or [no_values_like(values)]

        fields = {name: take(values) for name, values in self.fields.items()}
        names = {name: each[chosen] for name, each in self.names.items()}
        prefixes = None if self.prefixes is None else self.prefixes.select(chosen)
        numbers = self.mini_batch_of_sequence
        mini_batch = None if numbers is None else numbers[chosen]
        placed = None if self.placed is None else Placed(take(self.placed.before), self.placed.share[chosen])
        return Batch(self.lengths[chosen], take(self.tokens), fields, self.unit, names, prefixes, mini_batch, placed)

    def sequences_by_mini_batch(self) -> list[Array]:
        """The sequences of each optimizer step."""
        numbers = self.mini_batch_of_sequence
        if numbers is None:
            return [np.arange(len(self))]
        return [np.flatnonzero(numbers == each) for each in np.unique(numbers)]

    def only(self, names: Collection[str]) -> "Batch":
        """The same sequences with only the fields in `names`; names without a field are ignored."""
        return replace(self, fields={name: values for name, values in self.fields.items() if name in names})

    def with_fields(self, **fields: Sequence[Values]) -> "Batch":
        """The same sequences with more (or replaced) fields."""
        return replace(self, fields={**self.fields, **fields})

    def for_shares(self, shares: Sequence[Sequence[int]]) -> "Batch":
        """The same batch, ready to be sent in these shares.

        The placement of tokens is undone if a share would have to fetch several shares' arrays to read a part of each.
        """
        if self.placed is None or self.placed.suits(shares):
            return self
        return replace(self, tokens=self.placed.before, placed=None)

    def values(self, name: str) -> Tensor:
        """A field as a tensor [T] in this process; stored values are fetched."""
        return fetch_tensor(self.fields[name])

    def load(self) -> RaggedBatch:
        """The sequences as tensors in this process; stored values are fetched."""
        names = {name: torch.tensor(each) for name, each in self.names.items()}
        fields = {name: self.values(name) for name in self.fields if name != ROUTED_EXPERTS}
        lengths, routed_experts = torch.tensor(self.lengths), None
        if ROUTED_EXPERTS in self.fields:
            # Not concatenated, so that the ranks of a machine share the copy in its object store.
            routed_experts = fetch_each(self.fields[ROUTED_EXPERTS][: len(self)])
        return RaggedBatch(fetch_tensor(self.tokens), lengths, fields, self.unit, names, routed_experts)

    def kept(self, values: Tensor) -> Packed:
        """Split values [T] of this process by sequence; if they are many, they stay in its machine's object store."""
        return packed(put_sequences(values.numpy(), self.lengths) if len(self) else [])


def _unpacked_batch(lengths: Array, tokens: Packed, fields: Mapping[str, Packed], *rest: Any) -> Batch:
    return Batch(lengths, unpacked(tokens), {name: unpacked(values) for name, values in fields.items()}, *rest)


def fetch_tensor(sequences: Sequence[Values]) -> Tensor:
    """The values of all tokens as a tensor [T] in this process; stored values are fetched."""
    return torch.from_numpy(fetch_concatenated(sequences))


def sequences_of(values: Tensor, lengths: Array) -> list[Values]:
    """Split values [T] in this process by sequence."""
    return [(run_length_encoded(each),) for each in _pieces(values, lengths)]


def _pieces(values: Tensor, lengths: Array) -> list[Array]:
    return np.split(values.numpy(), lengths.cumsum()[:-1])
