"""The policy's multi-token prediction layers as the draft model of vLLM's speculative decoding."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Weights = Iterable[tuple[str, Tensor]]


class WithDraft(nn.Module):
    """Combines a model and its draft, which are two models in vLLM, into one that loads the weights of both.

    The shared embedding and output layer have their names in the main model.
    """

    def __init__(self, model: Any, draft: Any, layers: int) -> None:
        """`layers` is the number of the model's own layers; the draft's are numbered from there."""
        super().__init__()
        self.model = model
        self.draft = draft
        self._layers = layers

    def load_weights(self, weights: Weights) -> set[str]:
        """Load part of a HuggingFace checkpoint. Returns the names of the parameters that were loaded."""
        return self.model.load_weights(self._without_draft(weights))

    def _without_draft(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            number = _LAYER.match(name)
            if number is None or int(number[1]) < self._layers:
                yield name, tensor
                continue
            # vLLM's own check would demand all tensors of a layer at once.
            with disable_mtp_completeness_check():
                self.draft.load_weights([(name, tensor)])
