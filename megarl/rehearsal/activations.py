"""Activations of a rank: one micro-batch runs forward and backward through its part of the model, on fake tensors.

The modules are those for a CPU: unfused, so a GPU with Transformer Engine keeps slightly less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from converters.architectures import Head
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.memory.trainer import micro_batches_in_flight
from megarl.rehearsal.alive import Alive
from megatron_ext.forward import packed_sequences, predict_labels, predict_mtp, predict_values
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.model.multi_token_prediction import with_mtp_tokens
from megatron_ext.packing.packing import MicroBatch, Part, RaggedBatch
from megatron_ext.routing.router_balance import expect_routed_tokens
from megatron_ext.routing.router_replay import set_replayed_experts


@dataclass(frozen=True)
class MicroBatchSize:
    """Sequences of a data-parallel rank's micro-batch: as many of full length as fit, and one for the remaining tokens.

    Example: MicroBatchSize(tokens=16384, longest=9216) has sequences of 9,216 and 7,168 tokens.
    """

    tokens: int
    longest: int
    """Tokens of the longest sequence."""

    def lengths(self) -> list[int]:
        """Lengths of the sequences in tokens."""
        whole, rest = divmod(self.tokens, self.longest)
        return [self.longest] * whole + [rest] * bool(rest)


@dataclass(frozen=True)
class ActivationBytes:
    """Memory of one micro-batch on a rank, in addition to the state."""

    kept: int
    """Bytes kept between its forward and its backward pass, without what the next micro-batch reuses or replaces."""
    peak: int
    """The most bytes alive at a time, in both passes."""

    def of_stage(self, parallel: ParallelSizes, stage: int) -> int:
        """The most on a rank of a pipeline stage, with the number of micro-batches in flight in Megatron's schedule."""
        return round(self.kept * (micro_batches_in_flight(parallel, stage) - 1)) + self.peak


def rehearse_micro_batch(
    model: MegatronModel, size: MicroBatchSize, alive: Alive, *, backward: bool
) -> ActivationBytes:
    """Run one micro-batch through the chunks of this rank, without its neighbours; call it in a `fake_rank`.

    Without `backward` only the forward pass runs, and nothing is kept. Memory `alive` from earlier passes counts, too.
    """
    lengths = size.lengths()
    batch = RaggedBatch(
        torch.zeros(sum(lengths), dtype=torch.int32), torch.tensor(lengths), {"weights": torch.ones(sum(lengths))}
    )
    (micro_batch,) = model.micro_batches_of(batch, [range(len(lengths))])
    layers = model.trained_mtp_layers
    if backward and layers:
        micro_batch = with_mtp_tokens(micro_batch, layers)
    chunks = model.chunks if backward else model.bare_chunks
    passes = _Passes(model, micro_batch, chunks, alive)
    alive.peak = alive.nbytes
    with alive, torch.set_grad_enabled(backward):
        if not backward:
            passes.forward()
            return ActivationBytes(0, alive.peak)
        return passes.in_turn() if model.options.parallel.use_torch_fsdp2 else passes.in_flight()


@dataclass(frozen=True)
class _Passes:
    """Passes of one micro-batch through the chunks of a rank, after a first pass that builds shared tables."""

    model: MegatronModel
    micro_batch: MicroBatch
    chunks: Sequence[torch.nn.Module]
    alive: Alive

    def in_flight(self) -> ActivationBytes:
        """Run two micro-batches, of which the second shows what each keeps.

        Megatron's modules, and reference cycles of recomputed layers, hold parts of the last one even after its
        backward pass.
        """
        outputs = self.forward()
        first = self.alive.nbytes
        outputs += self.forward()
        kept = self.alive.nbytes - first
        self._go_back(outputs)
        return ActivationBytes(kept, self.alive.peak - kept)

    def in_turn(self) -> ActivationBytes:
        """Run two micro-batches one after the other: FSDP2 frees the output layer's weights after the first's use."""
        self._go_back(self.forward())
        for chunk in self.chunks:
            # Gradients count as state.
            chunk.zero_grad()
        before = self.alive.peak = self.alive.nbytes
        outputs = self.forward()
        kept = self.alive.nbytes - before
        self._go_back(outputs)
        return ActivationBytes(kept, self.alive.peak)

    def forward(self) -> list[Tensor]:
        """Outputs of the chunks."""
        return [_forward(chunk, self.micro_batch, self.model) for chunk in self.chunks]

    def _go_back(self, outputs: list[Tensor]) -> None:
        while outputs:
            output = outputs.pop()
            output.backward(torch.ones_like(output))
        for chunk in self.model.bare_chunks:
            chunk.set_input_tensor(None)


def _forward(chunk: torch.nn.Module, micro_batch: MicroBatch, model: MegatronModel) -> Tensor:
    """Output of a chunk, or for the last chunk a scalar that depends on every prediction."""
    own, bare = micro_batch.own, unwrap_model(chunk)
    set_replayed_experts(chunk, own)
    expect_routed_tokens(chunk, micro_batch)
    if not bare.pre_process:
        bare.set_input_tensor(_received(own, model))
    taken = None if own.mtp is None else own.mtp.taken
    output = chunk(own.tokens, own.position_ids, None, labels=taken, packed_seq_params=packed_sequences(own))
    if not bare.post_process:
        return output
    return sum(_numbers(bare, output, own, model.architecture.head), start=torch.zeros(()))


def _received(own: Part, model: MegatronModel) -> Tensor:
    """Hidden states received from the stage before."""
    tokens = own.tokens.shape[1] // model.options.parallel.tensor_model_parallel_size
    config: Any = model.bare_chunks[0].config
    return torch.empty(tokens, 1, config.hidden_size, dtype=config.params_dtype, requires_grad=True)


def _numbers(bare: Any, output: Any, own: Part, head: Head) -> Iterator[Tensor]:
    if head == "value":
        yield predict_values(bare, output, own).sum()
        return
    predicted: Sequence[Any]
    if own.mtp is None:
        predicted = [predict_labels(1.0)(bare, output, own)]
    else:
        policy, of_layers = predict_mtp(1.0)(bare, output, own)
        predicted = [policy, *of_layers]
    for each in predicted:
        yield each.log_probs.sum()
