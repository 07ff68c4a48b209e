"""Runs micro-batches through Megatron's pipeline schedules, forward only or with backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.profiler import record_function

from megatron_ext.attention.prefix_attention import SharedSequences
from megatron_ext.attention.rotary import PackedSequences, table_rows
from megatron_ext.log_probs import LogProbs
from megatron_ext.model.backbone import LanguageModel, ValueModel
from megatron_ext.model.multi_token_prediction import WithPredictionLayers, with_mtp_tokens
from megatron_ext.objective import Objective
from megatron_ext.optimizer.fully_sharded import free_gathered
from megatron_ext.optimizer.optimizer import Wrapped
from megatron_ext.optimizer.overlap import overlapping
from megatron_ext.packing.packing import MicroBatch, Part, RaggedBatch
from megatron_ext.packing.shared_prefixes import SharedPart
from megatron_ext.routing.router_balance import expect_routed_tokens
from megatron_ext.routing.router_replay import replaying, set_replayed_experts

P = TypeVar("P")
M = TypeVar("M")

Predict: TypeAlias = Callable[[Any, Any, Part], P]
"""Called on the last stage with the model, its output (hidden states) and the tokens of these."""


def predict_labels(temperature: float) -> Predict[LogProbs]:
    """Predict those labels of a micro-batch that are asked for, with a language model."""

    def predict(model: LanguageModel, hidden: Tensor, own: Part) -> LogProbs:
        own_labels = model.predict_labels(
            hidden, own.labels.squeeze(0), own.asked, own.predicting, temperature=temperature
        )
        return own_labels.mapped(own.whole)

    return predict


def predict_mtp(temperature: float) -> Predict[tuple[LogProbs, list[LogProbs]]]:
    """Predict as `predict_labels`, and with each prediction layer; needs parts with `mtp` tokens."""
    predict_own = predict_labels(temperature)

    def predict(model: LanguageModel, hidden: list[Tensor], own: Part) -> tuple[LogProbs, list[LogProbs]]:
        assert own.mtp is not None
        policy, *layers = hidden
        of_layers = model.predict_mtp(layers, own.mtp, temperature=temperature)
        return predict_own(model, policy, own), [each.mapped(own.whole) for each in of_layers]

    return predict


def predict_values(model: ValueModel, hidden: Tensor, own: Part) -> Tensor:
    """A value model's values [T'] of a micro-batch: index i is that of the state in which token i + 1 comes next."""
    return own.whole(own.of_labels(model.values(hidden)))


def predict_nothing(_model: torch.nn.Module, _hidden: Tensor, _own: Part) -> None:
    """Predict nothing, for a pass of which only the layers matter."""


def forward(chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], predict: Predict[P]) -> list[P]:
    """Return the predictions of each micro-batch; empty on all but the last pipeline stage.

    Runs in evaluation mode, without keeping activations.
    """

    def collect(predictions: P, _micro_batch: MicroBatch) -> P:
        return predictions

    step = partial(_forward_step, predict=predict, consume=collect)
    with torch.no_grad(), _evaluating(chunks):
        found = _run_schedule(chunks, micro_batches, step, forward_only=True, collect_non_loss_data=True)
    free_gathered(chunks)
    return found


@contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)


def forward_backward(
    chunks: Sequence[Wrapped],
    micro_batches: Sequence[MicroBatch],
    objective: Objective[P, M],
    predict: Predict[P],
) -> list[M]:
    """Add the gradients of `objective` to the chunks' gradient buffers.

    Returns the metrics of each micro-batch; empty on all but the last pipeline stage.
    """

    def loss_of(predictions: P, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, M]:
        loss, metrics = objective(predictions, micro_batch)
        return loss, torch.zeros((), dtype=torch.int), metrics

    step = partial(_forward_step, predict=predict, consume=loss_of)
    config = chunks[0].config
    config.finalize_model_grads_func = _finalize_without_scaling
    with overlapping(chunks):
        return _run_schedule(chunks, micro_batches, step, forward_only=False)


def forward_backward_mtp(
    chunks: Sequence[Wrapped],
    micro_batches: Sequence[MicroBatch],
    batch: RaggedBatch,
    objective: Objective[LogProbs, M],
    *,
    layers: int,
    temperature: float,
) -> tuple[list[M], Tensor | None]:
    """As `forward_backward` for a language model, with the loss of its prediction layers.

    Returns the metrics of each micro-batch, and `StepResult.mtp`. `batch` has the sequences of all micro-batches.
    """
    both = WithPredictionLayers(objective, batch, layers, chunks[0].config.mtp_loss_scaling_factor)
    with_tokens = [with_mtp_tokens(each, layers) for each in micro_batches]
    found = forward_backward(chunks, with_tokens, both, predict_mtp(temperature))
    mtp = torch.stack([each for _, each in found]).sum(0) if found else None
    return [metrics for metrics, _ in found], mtp


def _finalize_without_scaling(model: list[torch.nn.Module], _num_tokens: Tensor | None, **groups: Any) -> None:
    # The objective's weights include the global denominator, so Megatron must not divide by a token count.
    finalize_model_grads(model, None, **groups)


def _run_schedule(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], step: Callable, **options: Any
) -> list[Any]:
    iterators = [iter(micro_batches) for _ in chunks]
    single = len(chunks) == 1
    with replaying(chunks), record_function(f"{len(micro_batches)} micro-batches"):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(micro_batches),
            # Stages exchange shapes (variable_seq_lengths); these two are not read.
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=1,
            **options,
        )


def _forward_step(
    micro_batches: Iterator[MicroBatch],
    model: torch.nn.Module,
    *,
    predict: Predict[P],
    consume: Callable[[P, MicroBatch], object],
) -> tuple[Tensor, Callable]:
    micro_batch = next(micro_batches)
    own = micro_batch.own
    set_replayed_experts(model, own)
    expect_routed_tokens(model, micro_batch)
    with record_function(f"forward pass of {own.tokens.shape[1]} tokens"):
        taken = None if own.mtp is None else own.mtp.taken
        output = model(own.tokens, own.position_ids, None, labels=taken, packed_seq_params=packed_sequences(own))

    def on_last_stage(hidden: Tensor | list[Tensor], non_loss_data: bool = False) -> object:  # noqa: ARG001 - Megatron's signature
        with record_function("predictions and loss"):
            return consume(predict(unwrap_model(model), hidden, own), micro_batch)

    return output, on_last_stage


def packed_sequences(own: Part) -> PackedSequences:
    """The bounds of the sequences of a micro-batch, for every layer."""
    bounds: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": own.cu_seqlens,
        "cu_seqlens_kv": own.cu_seqlens,
        "max_seqlen_q": own.max_seqlen,
        "max_seqlen_kv": own.max_seqlen,
        "rotary_rows": table_rows(
            own.max_seqlen, own.tokens.shape[1] * parallel_state.get_context_parallel_world_size()
        ),
    }
    if isinstance(own, SharedPart):
        positions = own.position_ids.squeeze(0)
        # Only rotary embeddings read these bounds; they take all tokens as one sequence, each at its own position.
        everything = own.cu_seqlens[:: len(own.bounds) - 1]
        whole: dict[str, Any] = {"cu_seqlens_q_padded": everything, "cu_seqlens_kv_padded": everything}
        return SharedSequences(**bounds, **whole, bounds=own.bounds, levels=own.levels, positions=positions)
    return PackedSequences(**bounds)
