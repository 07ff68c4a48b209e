"""The `quantization_config` of a config.json, as transformers, vLLM and SGLang read it."""

from collections.abc import Mapping
from typing import Any

from converters.architectures import Architecture
from converters.errors import UserError
from converters.fp8.blocks import BLOCK
from converters.fp8.names import unquantised_modules

_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic",),
}
_IF_GIVEN: Mapping[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    # "ue8m0" says that the scales are powers of two, as in DeepSeek-V3.1, which changes nothing for a reader.
    "scale_fmt": ("float", "ue8m0"),
}


def is_block_fp8(hf_config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the weights are in block FP8.

    Raises UserError if they are quantised in another way.
    """
    quantisation = hf_config.get("quantization_config")
    if not quantisation:
        return False
    if not isinstance(quantisation, Mapping):
        raise UserError(f"config.json has quantization_config = {quantisation!r}, which says nothing; copy it again")
    for field, allowed in {**_REQUIRED, **_IF_GIVEN}.items():
        value = quantisation.get(field)
        if value not in allowed and not (value is None and field in _IF_GIVEN):
            options = " or ".join(repr(option) for option in allowed)
            raise UserError(
                f"config.json has {field} = {value!r} in quantization_config, which is not supported: only {options}"
                " is; give the model in bf16"
            )
    return True


def quantisation_config(architecture: Architecture) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose `quantised_names` are in FP8.

    It has the four fields of DeepSeek-V3 and, as Qwen3 has, the list of modules that are not quantised: vLLM expects
    Qwen3's routers in FP8 unless they are listed. Given a list, transformers expects the output layer in FP8, too,
    unless it is listed, tied or not.
    """
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": unquantised_modules(architecture),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
