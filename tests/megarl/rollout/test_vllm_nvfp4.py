"""NVFP4 beside vLLM: its reference for weights, and its layers on a CPU."""

import pytest
import torch
from engine_host import vllm_pool

from converters.number_formats import NVFP4


def _in_vllm(weight, codes):
    """Numbers of four bits and scales that vLLM makes of a weight, and the numbers that codes are for it."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    numbers, scales = ref_nvfp4_quant(weight, torch.tensor([NVFP4.global_scale]), 16)
    return numbers, scales, unpack_fp4_from_uint8(codes, *weight.shape)


def _linear_layer():
    """Say how stock vLLM refuses a layer on a CPU, and whether one that is corrected keeps codes and multiplies."""
    from types import SimpleNamespace

    from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as scheme,
    )

    from megarl.rollout.vllm import cpu

    try:
        stock = type(init_nvfp4_linear_kernel(use_a16=True)).__name__
    except ValueError as error:
        stock = str(error)
    cpu.number_formats.multiply_nvfp4_in_torch()
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    codes, scales = NVFP4.quantise(weight)
    layer = SimpleNamespace(weight=codes.clone(), weight_scale=scales)
    kernel = scheme.init_nvfp4_linear_kernel(use_a16=True)
    kernel.process_weights_after_loading(layer)
    product = kernel.apply_weights(layer, x, torch.ones(64))
    expected = x @ NVFP4.dequantise(codes, scales, torch.float32).T + 1
    return stock, torch.equal(layer.weight, codes), torch.allclose(product, expected, atol=1e-5)


@pytest.mark.long
def test_codes_are_those_of_vllm_and_layers_multiply_by_them():
    weight = torch.randn(64, 256) * torch.logspace(-5, 0, 64)[:, None]
    codes, scales = NVFP4.quantise(weight)
    with vllm_pool() as process:
        numbers, vllm_scales, unpacked = process.apply(_in_vllm, (weight, codes))
        stock, kept, right = process.apply(_linear_layer)
    assert torch.equal(scales.float(), vllm_scales)
    assert torch.equal(unpacked.float(), numbers)
    values = numbers.unflatten(1, (-1, 16)) * (vllm_scales / 256).unsqueeze(2)
    assert torch.equal(NVFP4.dequantise(codes, scales, torch.float32), values.flatten(1))
    assert "NVFP4" in stock
    assert kept
    assert right
