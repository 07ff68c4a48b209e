"""Converts ragged sequences to Megatron's packed (THD) micro-batches and back, with padding only for alignment."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron_ext.routing.routed_experts import RecordArrays, Records
from megatron_ext.routing.router_losses import RoutedTokens


@dataclass(frozen=True)
class RaggedBatch:
    """N concatenated sequences of different lengths.

    `tokens` is [T], int32 or long, and `lengths` long[N] with T = sum(lengths), every length at least 1. Each of
    `fields` has one value per token, [T]: the value at index t belongs to token t (its log-probability given the tokens
    before it, its advantage, its weight in the loss). Each of `names` has one number per sequence, long[N], by which
    errors identify it.

    With `unit` above 1, each `unit` consecutive sequences belong together (the two of a preference pair): micro-batches
    and data-parallel ranks get them whole and in order.

    `routed_experts` has, for each sequence, the `Routing` records of its tokens; None if there are none.

    Example: RaggedBatch(torch.tensor([5, 9, 40]), torch.tensor([2, 1]), {"weights": torch.tensor([0.0, 0.5, 0.5])})
    """

    tokens: Tensor
    lengths: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    unit: int = 1
    names: Mapping[str, Tensor] = field(default_factory=dict)
    routed_experts: Sequence[RecordArrays] | None = None

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise ValueError("every sequence of a RaggedBatch needs at least one token")
        if len(self.lengths) % self.unit:
            raise ValueError(f"a RaggedBatch of {len(self.lengths)} sequences is not made of units of {self.unit}")
        for name, values in {"tokens": self.tokens, **self.fields}.items():
            if values.shape != (total,):
                raise ValueError(f"RaggedBatch: {name} has shape {tuple(values.shape)}, the lengths say ({total},)")
        if self.routed_experts is not None:
            records = [sum(map(len, arrays)) for arrays in self.routed_experts]
            if records != self.lengths.tolist():
                raise ValueError(f"RaggedBatch: {records} records of routed experts for {self.lengths.tolist()} tokens")
        for name, values in self.names.items():
            if values.shape != self.lengths.shape:
                raise ValueError(f"RaggedBatch: {name} has shape {tuple(values.shape)} for {len(self)} sequences")

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, sequences: Sequence[int] | Tensor) -> "RaggedBatch":
        """The given sequences, in the given order; an index may appear more than once."""
        chosen = torch.as_tensor(sequences, dtype=torch.long, device=self.lengths.device)
        lengths = self.lengths[chosen]
        ends = self.lengths.cumsum(0)[chosen]
        places = [slice(end - length, end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

        def take(values: Tensor) -> Tensor:
            return torch.cat([values[place] for place in places]) if places else values[:0]

        fields = {name: take(values) for name, values in self.fields.items()}
        names = {name: values[chosen] for name, values in self.names.items()}
        records = self.routed_experts
        routed_experts = None if records is None else [records[sequence] for sequence in chosen.tolist()]
        return RaggedBatch(take(self.tokens), lengths, fields, self.unit, names, routed_experts)

    def with_fields(self, **fields: Tensor) -> "RaggedBatch":
        """The same sequences with more (or replaced) fields, each [T]."""
        return replace(self, fields={**self.fields, **fields})


def asked_field(fields: Container[str]) -> str | None:
    """Name of the field that says which labels to predict; None if all are predicted.

    These are the labels with a weight in the loss or, without the field `weights`, those of `trained` tokens.
    """
    return next((name for name in ("weights", "trained") if name in fields), None)


def asked(fields: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Which labels to predict according to `fields`, bool[T]; `labels` without such a field. NaN counts as nonzero."""
    name = asked_field(fields)
    return labels if name is None else fields[name] != 0


DRAFTED = "drafted"
"""Field of a batch that says which of the predicted labels the prediction layers learn; by default, all."""


def drafted(fields: Mapping[str, Tensor], are_asked: Tensor) -> Tensor:
    """Which labels the prediction layers learn, bool[T], among those to predict."""
    return are_asked & fields[DRAFTED] if DRAFTED in fields else are_asked


class MtpTokens(NamedTuple):
    """Tokens for D prediction layers, one row per layer; 0 where a sequence has no such token."""

    taken: Tensor
    """long[D, L]: the input tokens of each layer."""
    labels: Tensor
    """long[D, L]: the tokens that each layer predicts from them."""
    asked: Tensor
    """bool[D, L]: which labels count in the loss."""

    def to(self, device: torch.device) -> "MtpTokens":
        """The same on `device`."""
        return MtpTokens(*(each.to(device, non_blocking=True) for each in self))


@dataclass(frozen=True)
class Part:
    """The L tokens that one rank computes with: all of a micro-batch, or a part of each of its sequences."""

    tokens: Tensor
    """long[1, L]"""
    labels: Tensor
    """long[1, L]"""
    position_ids: Tensor
    """long[1, L]: positions within each sequence, from 0."""
    cu_seqlens: Tensor
    """int32[sequences + 1], including the sequence of padding: PackedSeqParams.cu_seqlens_q and _kv."""
    max_seqlen: int
    asked: Tensor
    """bool[L]: which labels to predict."""
    routed_experts: Records | None
    """Stays in host memory."""
    mtp: MtpTokens | None = field(default=None, kw_only=True)
    """Tokens for prediction layers, if these train; see `multi_token_prediction.with_mtp_tokens`."""

    @property
    def predicting(self) -> Tensor | None:
        """Index of the token that predicts each label; None if it is the label's own index."""
        return None

    def rows(self) -> tuple[Tensor, Tensor]:
        """Two long[M]: for each token, its index among these L tokens and its index among the micro-batch's T'."""
        every = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return every, every

    def of_labels(self, values: Tensor) -> Tensor:
        """Convert values per token to values per label; differentiable."""
        return values if self.predicting is None else values.index_select(0, self.predicting)

    def whole(self, values: Tensor) -> Tensor:
        """Convert values per label to values [T'] of the micro-batch."""
        return values

    def to(self, device: torch.device) -> Self:
        """The same tokens with their tensors on `device`."""
        return replace(self, **{name: _moved(value, device) for name, value in vars(self).items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return value.to(device) if hasattr(value, "to") else value


@dataclass(frozen=True)
class MicroBatch(Part):
    """Packed sequences as `GPTModel` takes them: a Part with all T' tokens, including padding for alignment.

    Index i predicts the token at i + 1 of the same sequence: that token is label i, and index i of a field has the
    value of that token. Where there is no next token (`targets` is False: the last of each sequence, and padding),
    labels and fields are 0. Padding is a sequence of its own at the end, so that attention does not mix it with real
    tokens. Unlike labels, records of routed experts are not shifted: each belongs to the token at its index. Padding
    has none.
    """

    targets: Tensor
    """bool[T']"""
    fields: Mapping[str, Tensor]
    """[T'] each."""
    lengths: Tensor
    """long[sequences], without the sequence of padding."""
    real_tokens: int
    """Number of tokens other than padding."""
    unit: int = 1
    """See `RaggedBatch`."""
    names: Mapping[str, Tensor] = field(default_factory=dict)
    """See `RaggedBatch`; stays in host memory."""
    part: Part | None = None
    """The tokens that this rank computes with; None if these are all."""
    routed: RoutedTokens | None = None
    """The tokens that this rank's routers see, if a step counts them; see `router_balance.routed_tokens`."""

    @property
    def own(self) -> Part:
        """The tokens that this rank computes with."""
        return self.part or self

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        return replace(super().to(device), fields={name: _moved(each, device) for name, each in self.fields.items()})


def pack(batch: RaggedBatch, sequences: Sequence[int], align: int = 1) -> MicroBatch:
    """Pack the given sequences of `batch` into a micro-batch whose number of tokens is a multiple of `align`.

    Without sequences it consists of `align` padding tokens, for a rank that has nothing left to do while others run.
    """
    chosen = batch.select(sequences)
    tokens = chosen.tokens.long()
    real_tokens = len(tokens)
    padding = -real_tokens % align if real_tokens else align
    lengths = torch.cat([chosen.lengths, chosen.lengths.new_tensor([padding])]) if padding else chosen.lengths
    ends = lengths.cumsum(0)
    targets = torch.ones(real_tokens + padding, dtype=torch.bool, device=lengths.device)
    targets[ends - 1] = False
    targets[real_tokens:] = False

    def next_token(values: Tensor) -> Tensor:
        shifted = values.new_zeros(len(targets))
        shifted[: max(real_tokens - 1, 0)] = values[1:]
        return shifted.masked_fill_(~targets, 0)

    fields = {name: next_token(values) for name, values in chosen.fields.items()}
    return MicroBatch(
        tokens=torch.cat([tokens, tokens.new_zeros(padding)])[None],
        labels=next_token(tokens)[None],
        position_ids=positions_within(lengths)[None],
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        max_seqlen=int(lengths.max()),
        asked=asked(fields, targets),
        targets=targets,
        fields=fields,
        lengths=chosen.lengths,
        real_tokens=real_tokens,
        unit=batch.unit,
        names=chosen.names,
        routed_experts=_records(chosen, real_tokens + padding),
    )


def _records(batch: RaggedBatch, tokens: int) -> Records | None:
    """Records for `tokens` tokens: those of `batch`, then padding, which has none."""
    if batch.routed_experts is None:
        return None
    return Records(list(chain.from_iterable(batch.routed_experts)), torch.arange(tokens))


def unpack(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Convert values [T'] of labels to values [T] of the packed sequences' tokens.

    The first token of a sequence, which nothing predicts, gets 0; padding is dropped.
    """
    result = values.new_zeros(micro_batch.real_tokens)
    result[1:] = values.masked_fill(~micro_batch.targets, 0)[: max(micro_batch.real_tokens - 1, 0)]
    return result


def packed_order(micro_batches: Sequence[Sequence[int]]) -> Tensor:
    """Sequence indices in the order of the micro-batches."""
    return torch.tensor([index for sequences in micro_batches for index in sequences], dtype=torch.long)


def unpack_all(
    values: Sequence[Tensor], packed: Sequence[MicroBatch], batch: RaggedBatch, micro_batches: Sequence[Sequence[int]]
) -> Tensor:
    """Unpack the values of all micro-batches, on the host, in the order of the batch that they were packed from."""
    order = packed_order(micro_batches)
    in_packed_order = torch.cat([unpack(value, each) for value, each in zip(values, packed, strict=True)]).cpu()
    if not len(batch):
        return in_packed_order
    pieces = in_packed_order.split(batch.lengths[order].tolist())
    return torch.cat([pieces[position] for position in order.argsort().tolist()])


def last_tokens(micro_batch: MicroBatch) -> Tensor:
    """long[sequences]: the index of each sequence's last token, without the sequence of padding."""
    return micro_batch.lengths.cumsum(0) - 1


def positions_within(lengths: Tensor) -> Tensor:
    """long[T]: the position of each token within its sequence, for concatenated sequences of `lengths` long[N]."""
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths, output_size=total)
