"""Weights that vLLM reads from a checkpoint, made into the number format that the engine was asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import NUMBER_FORMATS
from megarl.rollout.vllm.kind import NUMBER_FORMAT, QUANTISATION


def quantise_what_is_read() -> None:
    """Have an engine that holds a number format read a checkpoint that is in none.

    vLLM 0.32 quantises what it reads into other formats, by rules of its own, and takes what is to be in blocks for
    codes already.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        weights = original(self, model_config, model)
        name = (getattr(model_config.hf_config, QUANTISATION, None) or {}).get(NUMBER_FORMAT)
        if name is None:
            yield from weights
            return
        number_format = NUMBER_FORMATS[name]
        quantised = number_format.quantised_names(read_architecture(read_json(Path(model_config.model) / CONFIG)))
        for each, weight in weights:
            if each not in quantised:
                yield each, weight
                continue
            # As a refit would: from the type that is trained.
            codes, scales = number_format.quantise(weight.to(model_config.dtype))
            yield each, codes
            yield number_format.scales_name(each), scales

    DefaultModelLoader.get_all_weights = get_all_weights
