"""Quantises the weights that an engine loads from a checkpoint to the number format that it was asked for.

The engine gets a `quantization_config` like that of a checkpoint in the format, with the format's name as an extra
field, which says that the checkpoint itself is not quantised.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import NUMBER_FORMATS
from megarl.rollout.kind import NUMBER_FORMAT, QUANTISATION
from megatron_ext import device


def in_asked_format(
    weights: Iterable[tuple[str, Tensor]], model_path: str, hf_config: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` of the checkpoint in `model_path`, in the number format that the engine's `hf_config` asks for.

    The format's matrices become codes and scales, equal to those of a refit of a policy in `dtype`. They are computed
    on this worker's device: a GPU worker has one CPU thread, which would take 20 minutes for 671B parameters.
    """
    asked: Mapping[str, Any] = getattr(hf_config, QUANTISATION, None) or {}
    if NUMBER_FORMAT not in asked:
        yield from weights
        return
    number_format = NUMBER_FORMATS[asked[NUMBER_FORMAT]]
    quantised = number_format.quantised_names(read_architecture(read_json(Path(model_path) / CONFIG)))
    for name, weight in weights:
        if name in quantised:
            yield from number_format.tensors(name, weight.to(device.device(), dtype))
        else:
            yield name, weight
