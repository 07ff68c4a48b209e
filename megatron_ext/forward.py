"""Running micro-batches through Megatron's pipeline schedules, forward alone or with backward."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext.log_probs import LogProbs, log_probs_and_entropy
from megatron_ext.objective import Objective
from megatron_ext.packing import MicroBatch


def forward_log_probs(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], *, vocab_size: int, temperature: float
) -> list[LogProbs]:
    """Log-probabilities of each micro-batch's labels; empty on all but the last pipeline stage."""

    def collect(predictions: LogProbs, _micro_batch: MicroBatch) -> LogProbs:
        return predictions

    step = partial(_forward_step, vocab_size=vocab_size, temperature=temperature, consume=collect)
    with torch.no_grad():
        return _run_schedule(chunks, micro_batches, step, forward_only=True, collect_non_loss_data=True)


def forward_backward(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    vocab_size: int,
    temperature: float,
) -> list[Any]:
    """Add the gradients of `objective` to the chunks' gradient buffers.

    Returns the metrics of each micro-batch; empty on all but the last pipeline stage.
    """

    def lose(predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        loss, metrics = objective(predictions, micro_batch)
        return loss, torch.zeros((), dtype=torch.int), metrics

    step = partial(_forward_step, vocab_size=vocab_size, temperature=temperature, consume=lose)
    config = chunks[0].config
    config.finalize_model_grads_func = _finalize_without_scaling
    return _run_schedule(chunks, micro_batches, step, forward_only=False)


def _finalize_without_scaling(model: list[torch.nn.Module], _num_tokens: Tensor | None, **groups: Any) -> None:
    # The objective's weights hold the global denominator; Megatron's own division by a token count would repeat it.
    finalize_model_grads(model, None, **groups)


def _run_schedule(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], step: Callable, **options: Any
) -> list[Any]:
    iterators = [iter(micro_batches) for _ in chunks]
    single = len(chunks) == 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(micro_batches),
        # Shapes are exchanged between stages (variable_seq_lengths); these two are not read.
        seq_length=micro_batches[0].tokens.shape[1],
        micro_batch_size=1,
        **options,
    )


def _forward_step(
    micro_batches: Iterator[MicroBatch],
    model: torch.nn.Module,
    *,
    vocab_size: int,
    temperature: float,
    consume: Callable[[LogProbs, MicroBatch], Any],
) -> tuple[Tensor, Callable]:
    micro_batch = next(micro_batches)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
    output = model(micro_batch.tokens, micro_batch.position_ids, None, packed_seq_params=packed)

    def on_last_stage(logits: Tensor, non_loss_data: bool = False) -> Any:  # noqa: ARG001 - Megatron's signature
        predictions = log_probs_and_entropy(
            logits.squeeze(0),
            micro_batch.labels.squeeze(0),
            get_tensor_model_parallel_group(),
            vocab_size=vocab_size,
            temperature=temperature,
        )
        return consume(predictions, micro_batch)

    return output, on_last_stage
