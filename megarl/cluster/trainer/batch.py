"""A batch as the controller holds it and the ranks get it: lengths, and where the values of each sequence are."""

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
"""Begins the name of a prediction of the reference model."""


@dataclass(frozen=True)
class Placed:
    """Where the tokens of N sequences were before a model's shares had arrays of their own, and whose array has each.

    It is known in this process alone, and not sent along.
    """

    before: Sequence[Values]
    share: Array
    """int64[N]"""

    def suits(self, shares: Sequence[Sequence[int]]) -> bool:
        """Whether each of these shares of the sequences, that of another model perhaps, has an array for itself."""
        arrays = [set(self.share[list(sequences)].tolist()) for sequences in shares if sequences]
        return len(set().union(*arrays)) == len(arrays) == sum(map(len, arrays))


@dataclass(frozen=True)
class Batch:
    """N sequences of different lengths, with their values here or in the object store.

    `tokens`, int32, and each of `fields` have an entry for each sequence; without sequences there is one entry with no
    values, which has their type. `lengths`, `unit` and `names` are those of a `RaggedBatch`, which `load` makes where
    something is computed.

    Example: Batch(np.array([3]), [(np.array([5]), np.array([9, 2]))], {"weights": [(np.float32([0, 0.5, 0.5]),)]})
    """

    lengths: Array
    tokens: Sequence[Values]
    fields: Mapping[str, Sequence[Values]] = field(default_factory=dict)
    unit: int = 1
    names: Mapping[str, Array] = field(default_factory=dict)
    prefixes: Prefixes | None = None
    """Common beginnings of sequences, if it is known."""
    mini_batch_of_sequence: Array | None = None
    """int64[N]: the optimizer step that each sequence is for; None if it is the same one."""
    placed: Placed | None = None
    """Known of a batch whose tokens are in arrays for the shares of a model."""

    @classmethod
    def of(cls, batch: RaggedBatch) -> "Batch":
        """The sequences of a batch whose values are all here."""
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
        """The same, ready to be sent in these shares.

        Tokens are as they were before they were placed if a share would have to fetch arrays of several, to read a
        part of each.
        """
        if self.placed is None or self.placed.suits(shares):
            return self
        return replace(self, tokens=self.placed.before, placed=None)

    def values(self, name: str) -> Tensor:
        """[T]: a field in a tensor of this process; what is stored is fetched."""
        return fetch_tensor(self.fields[name])

    def load(self) -> RaggedBatch:
        """The sequences in tensors of this process; what is stored is fetched."""
        names = {name: torch.tensor(each) for name, each in self.names.items()}
        fields = {name: self.values(name) for name in self.fields if name != ROUTED_EXPERTS}
        lengths, routed_experts = torch.tensor(self.lengths), None
        if ROUTED_EXPERTS in self.fields:
            # Not concatenated: ranks of a machine that look into its object store share the only copy.
            routed_experts = fetch_each(self.fields[ROUTED_EXPERTS][: len(self)])
        return RaggedBatch(fetch_tensor(self.tokens), lengths, fields, self.unit, names, routed_experts)

    def kept(self, values: Tensor) -> Packed:
        """Values [T] that this process made, by sequence; many stay in the object store of its machine."""
        return packed(put_sequences(values.numpy(), self.lengths) if len(self) else [])


def _unpacked_batch(lengths: Array, tokens: Packed, fields: Mapping[str, Packed], *rest: Any) -> Batch:
    return Batch(lengths, unpacked(tokens), {name: unpacked(values) for name, values in fields.items()}, *rest)


def fetch_tensor(sequences: Sequence[Values]) -> Tensor:
    """[T]: values of all tokens in a tensor of this process; what is stored is fetched."""
    return torch.from_numpy(fetch_concatenated(sequences))


def sequences_of(values: Tensor, lengths: Array) -> list[Values]:
    """Values [T] that are here, by sequence."""
    return [(run_length_encoded(each),) for each in _pieces(values, lengths)]


def _pieces(values: Tensor, lengths: Array) -> list[Array]:
    return np.split(values.numpy(), lengths.cumsum()[:-1])
