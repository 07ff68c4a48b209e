"""Heads of the last stage, which compute next-token predictions or a value per token from hidden states."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.log_probs import LogProbs, linear_log_probs


class LanguageModelHead(ColumnParallelLinear):
    """The output layer of a GPTModel: computes log-probabilities of labels without keeping the logits of all tokens.

    It takes over the weight of `layer`, which has none if it is tied to an embedding on the same stage.
    """

    def __init__(
        self, layer: ColumnParallelLinear, vocab_size: int, softcap: float | None, *, fp32_logits: bool
    ) -> None:
        config = layer.config
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        self.weight = layer.weight
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.fp32_logits = fp32_logits

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        asked: Tensor | None = None,
        predicting: Tensor | None = None,
        *,
        temperature: float,
    ) -> LogProbs:
        """Predict `labels` [T] from hidden states [T, 1, H], or those of this rank's tokens with sequence parallelism.

        `weight` replaces the layer's own weight. `asked` bool[T], the same on all tensor-parallel ranks, says which
        labels to predict, so that no logits are computed for prompts; the values of other labels are 0. `predicting`
        long[T] is the index of the hidden state that predicts each label; by default, the label's own index.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        hidden = hidden.squeeze(1)
        places = None if asked is None else asked.nonzero().squeeze(1)
        rows = places if predicting is None or places is None else predicting[places]
        predictions = linear_log_probs(
            hidden if rows is None else hidden.index_select(0, rows),
            self.weight if weight is None else weight,
            labels if places is None else labels[places],
            self.tp_group,
            vocab_size=self.vocab_size,
            temperature=temperature,
            softcap=self.softcap,
            fp32_logits=self.fp32_logits,
        )
        return predictions if places is None else predictions.placed(places, len(labels))


class ValueHead(MegatronModule):
    """A linear layer from a hidden state to one number, computed in float32; its weight is replicated on all ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank sees its own tokens, so Megatron must sum the gradient over TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """float32[T], from hidden states [T, 1, H], or those of this rank's tokens with sequence parallelism."""
        values = F.linear(hidden.float(), self.weight.float()).flatten()
        if self.config.sequence_parallel:
            # Every rank computes the same loss from all values, so each takes its own tokens' part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values
