"""GPTModels that return hidden states on every stage, including the last, and compute predictions from them."""

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.log_probs import LogProbs
from megatron_ext.model.heads import LanguageModelHead, ValueHead
from megatron_ext.model.multi_token_prediction import WithoutGradient
from megatron_ext.packing.packing import MtpTokens

_OF_LAYERS = (
    *("position_ids", "attention_mask", "inference_params", "packed_seq_params", "sequence_len_offset"),
    *("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
)
"""Arguments that GPTModel passes to every layer."""


class Backbone(GPTModel):
    """On the last stage, `forward` returns the last layer's hidden states after the final norm: [tokens, 1, H].

    With sequence parallelism these are the tokens of this rank. Neither logits nor a loss are computed.
    """

    def _postprocess(self, hidden_states: Tensor, **_options: Any) -> Any:
        return hidden_states


class LanguageModel(Backbone):
    """A backbone with an output layer over the first `real_vocab_size` rows of the padded vocabulary.

    It may have layers for multi-token prediction. If these are detached, their loss only changes their own parameters.
    """

    output_layer: Any
    """GPTModel's own layer during construction, then a LanguageModelHead with its weight."""

    def __init__(
        self, *, real_vocab_size: int, softcap: float | None, fp32_logits: bool, mtp_is_detached: bool, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._mtp_is_detached = mtp_is_detached
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
        """Log-probs of `labels` [T] from the hidden states; on the last stage only.

        Where `asked` bool[T] is False, nothing is computed, and all values are 0. `predicting` long[T] is the index of
        the hidden state that predicts each label; by default, the label's own index.
        """
        return self.output_layer(hidden, labels, self._tied_weight, asked, predicting, temperature=temperature)

    def predict_mtp(self, hidden: Sequence[Tensor], mtp: MtpTokens, *, temperature: float) -> list[LogProbs]:
        """Log-probs of the labels [L] of each prediction layer from its hidden states; on the last stage only."""
        weight = self._tied_weight
        if self._mtp_is_detached:
            weight = (self.output_layer.weight if weight is None else weight).detach()
        return [
            self.output_layer(of_layer, labels, weight, asked, temperature=temperature)
            for of_layer, labels, asked in zip(hidden, mtp.labels, mtp.asked, strict=True)
        ]

    @property
    def _tied_weight(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def _postprocess(
        self, hidden_states: Tensor, labels: Tensor | None = None, **options: Any
    ) -> Tensor | list[Tensor]:
        """The hidden states; with `labels` long[D, L], the input tokens of prediction layers, also those of each."""
        if labels is None or not self.mtp_process:
            return hidden_states
        embedding = self.embedding
        found, hidden = [hidden_states], hidden_states
        if self._mtp_is_detached:
            hidden = hidden.detach()

            def embedding(**inputs: Tensor) -> Tensor:
                return WithoutGradient.apply(self.embedding(**inputs))

        for layer, tokens in zip(self.mtp.layers, labels, strict=True):
            chosen = {name: options[name] for name in _OF_LAYERS}
            hidden, *_ = layer(input_ids=tokens[None], hidden_states=hidden, embedding=embedding, **chosen)
            found.append(hidden)
        return found


class ValueModel(Backbone):
    """A backbone with a value head, which computes one number per token, instead of an output layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config)

    def values(self, hidden: Tensor) -> Tensor:
        """float32[T], from the hidden states; on the last stage only."""
        return self.value_head(hidden)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The state dict of all submodules; GPTModel's own method requires an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
