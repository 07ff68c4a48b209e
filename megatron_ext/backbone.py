"""A GPTModel that gives hidden states on every stage, the last too, and what its head makes of them."""

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.heads import LanguageModelHead, ValueHead
from megatron_ext.log_probs import LogProbs


class Backbone(GPTModel):
    """`forward` gives the normed hidden states of the last layer on the last stage: [tokens, 1, H].

    Under sequence parallelism these are the tokens of this rank. No loss and no logits are computed, and layers for
    multi-token prediction are left out.
    """

    def _postprocess(self, hidden_states: Tensor, **_options: Any) -> Tensor:
        return hidden_states


class LanguageModel(Backbone):
    """With an output layer over the first `real_vocab_size` of the (padded) vocabulary."""

    output_layer: Any
    """GPTModel's, until its weight is given to a LanguageModelHead."""

    def __init__(self, *, real_vocab_size: int, softcap: float | None, fp32_logits: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            layer = self.output_layer
            self.output_layer = LanguageModelHead(layer, real_vocab_size, softcap, fp32_logits=fp32_logits)

    def predict_labels(
        self,
        hidden: Tensor,
        labels: Tensor,
        asked: Tensor | None = None,
        predicting: Tensor | None = None,
        *,
        temperature: float,
    ) -> LogProbs:
        """Log-probs of `labels` [T] by their hidden states; on the last stage only.

        Where `asked` bool[T] is False nothing is computed, and all values are 0. With `predicting` long[T] a label's
        hidden state is the one at that place, and not at its own.
        """
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, labels, tied, asked, predicting, temperature=temperature)


class ValueModel(Backbone):
    """With a value for each token in the place of an output layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config)

    def values(self, hidden: Tensor) -> Tensor:
        """float32[T], by the hidden states; on the last stage only."""
        return self.value_head(hidden)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """As GPTModel's, which insists on an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
