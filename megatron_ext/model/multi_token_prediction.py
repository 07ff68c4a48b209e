"""Multi-token prediction: layers that predict tokens further ahead, trained with the policy.

The method is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2). Layer k of D sees the hidden state of token i and
the tokens up to i + k, and predicts token i + k + 1. Its loss is the mean of -log p(token) over the trained tokens that
it can predict, those from position k + 1 of their sequence on, in the batch of an optimizer step. p is the same
softmax(logits / temperature) as for the policy's own log-probs. As in Megatron, the sum over the layers times
mtp_loss_scaling_factor / D is added to the objective. A batch may exclude tokens (`DRAFTED`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_ext import device, versions
from megatron_ext.log_probs import LogProbs
from megatron_ext.objective import Objective
from megatron_ext.options.options import MtpTraining
from megatron_ext.packing.packing import MicroBatch, MtpTokens, RaggedBatch, asked, drafted, positions_within

M = TypeVar("M")


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's layer, which is given its input tokens here, and can be recomputed with packed sequences.

    megatron-core itself shifts the tokens by one position in a loop over the packed sequences that synchronizes with
    the device for each.
    """

    def _get_embeddings(
        self, input_ids: Tensor, position_ids: Tensor, embedding: Any, hidden_states: Tensor, **_options: Any
    ) -> tuple[Tensor | None, ...]:
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return versions.prediction_inputs(input_ids, position_ids, embedded, hidden)

    def _checkpointed_forward(self, *_function: Callable[..., Tensor], **options: Any) -> Tensor:
        # megatron-core 0.16 passes the bounds of packed sequences to a checkpoint function that only saves tensors, or
        # passes everything by name to one that only computes gradients of positional tensors (`te_checkpoint`). It also
        # passes the function to be recomputed, which 0.19 does not.
        def run(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            inputs = {"hidden_states": hidden_states, "decoder_input": decoder_input}
            return self._proj_and_transformer_layer(**{**options, **inputs})

        inputs = options["hidden_states"], options["decoder_input"]
        is_distributed = self.config.distribute_saved_activations
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, is_distributed, *inputs)
        group, tracker = parallel_state.get_tensor_model_parallel_group(), tensor_parallel.random.get_cuda_rng_tracker
        return transformer_engine.te_checkpoint(run, is_distributed, tracker, group, *inputs)


class WithoutGradient(torch.autograd.Function):
    """The identity in the forward pass; the gradient is zero.

    Unlike with `detach`, Megatron's hooks see that the parameter behind it has its gradient: a reduction that overlaps
    with the backward pass waits for all parameters of a bucket.
    """

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        """Return the values."""
        return values.view_as(values)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(gradient)


def prepare_layers(chunks: Sequence[torch.nn.Module], training: MtpTraining) -> None:
    """Prepare the prediction layers for `training`; call before wrapping in DDP.

    With "none" they are frozen. With "detached" the gradient norm, by which all gradients are clipped, is that of the
    other parameters only.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, PredictionLayer)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        if training == "none":
            parameter.requires_grad_(False)
        elif training == "detached":
            # Megatron's norm excludes parameters that are marked as copies.
            parameter.shared = True


def with_mtp_tokens(micro_batch: MicroBatch, layers: int) -> MicroBatch:
    """`micro_batch` with the inputs and labels of `layers` prediction layers."""
    own = micro_batch.own
    rows, tokens = own.rows()

    def next_of(values: Tensor) -> Tensor:
        return values.roll(-1).masked_fill(~micro_batch.targets, 0)

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(own.tokens.shape[1]).index_copy(0, rows, values[tokens])

    taken, are_asked = [micro_batch.labels[0]], [drafted(micro_batch.fields, micro_batch.asked)]
    for _ in range(layers):
        taken.append(next_of(taken[-1]))
        are_asked.append(next_of(are_asked[-1]))
    mtp = MtpTokens(
        taken=torch.stack([placed(each) for each in taken[:-1]]),
        labels=torch.stack([placed(each) for each in taken[1:]]),
        asked=torch.stack([placed(each) for each in are_asked[1:]]),
    )
    if micro_batch.part is None:
        return replace(micro_batch, mtp=mtp)
    return replace(micro_batch, part=replace(own, mtp=mtp))


class WithPredictionLayers(Generic[M]):
    """An objective with the loss of prediction layers added.

    Its metrics are those of the objective, and float64[D, 2]: for each layer, this micro-batch's contribution to two
    means over the tokens that the layer predicts, -log p and whether the token was the layer's greedy choice.
    """

    def __init__(self, objective: Objective[LogProbs, M], batch: RaggedBatch, layers: int, factor: float) -> None:
        """Collective over the data-parallel ranks, each with its part of the batch."""
        self._objective = objective
        counts = predictable(batch, layers).to(device.device())
        dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        # If all responses have one token, later layers have nothing to predict.
        self._counts = counts.clamp(min=1)
        self._factor = factor / layers

    def __call__(
        self, predictions: tuple[LogProbs, list[LogProbs]], micro_batch: MicroBatch
    ) -> tuple[Tensor, tuple[M, Tensor]]:
        """See `Objective`; `predictions` are those of the policy and of each layer."""
        own, of_layers = predictions
        loss, metrics = self._objective(own, micro_batch)
        found = []
        for count, layer in zip(self._counts, of_layers, strict=True):
            # A token that was not asked for has a log-probability of 0, and its greedy flag is False.
            mean = -layer.log_probs.sum() / count
            loss = loss + self._factor * mean
            found.append(torch.stack([mean.detach().double(), layer.greedy.double().sum() / count]))
        return loss, (metrics, torch.stack(found))


def predictable(batch: RaggedBatch, layers: int) -> Tensor:
    """long[layers]: for each layer, how many of the tokens that are asked for it predicts."""
    place = positions_within(batch.lengths)
    are_asked = drafted(batch.fields, asked(batch.fields, place >= 0))
    return torch.stack([(are_asked & (place >= layer + 2)).sum() for layer in range(layers)])
