"""Quantises the weights that vLLM loads from a checkpoint to the number format that the engine was asked for."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megarl.rollout.quantised_load import in_asked_format


def quantise_what_is_read() -> None:
    """Let an engine that holds a number format load a checkpoint that is not quantised.

    vLLM 0.32 quantises on loading only to other formats and by its own rules, and expects a checkpoint for block
    formats to have codes already.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        weights = original(self, model_config, model)
        return in_asked_format(weights, model_config.model, model_config.hf_config, model_config.dtype)

    DefaultModelLoader.get_all_weights = get_all_weights
