"""Weights that vLLM reads from a checkpoint, made into the number format that the engine was asked for."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megarl.rollout.quantised_load import in_asked_format


def quantise_what_is_read() -> None:
    """Have an engine that holds a number format read a checkpoint that is in none.

    vLLM 0.32 quantises what it reads into other formats, by rules of its own, and takes what is to be in blocks for
    codes already.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        weights = original(self, model_config, model)
        return in_asked_format(weights, model_config.model, model_config.hf_config, model_config.dtype)

    DefaultModelLoader.get_all_weights = get_all_weights
