"""Weights that block FP8 cannot stand for are refused, and named."""

import pytest
import torch

from converters.fp8 import dequantise_into, quantise_into
from converters.number_formats import FP8_BLOCK

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_named(code):
    codes = torch.zeros(600, 9000, dtype=torch.uint8)
    codes[555, 8888] = code
    with pytest.raises(ValueError, match="the code in row 555, column 8888 is NaN"):
        FP8_BLOCK.dequantise(codes.view(FP8), torch.ones(5, 71), BF16)
    box = codes.view(FP8)[500:, 8800:]
    with pytest.raises(ValueError, match="the code in row 555, column 8888 is NaN"):
        dequantise_into(box, torch.ones(5, 71), torch.empty(box.shape), row_start=500, column_start=8800)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf"), 2.0**120])
def test_a_scale_that_is_not_finite_or_too_large_is_named(scale):
    scales = torch.ones(3, 4)
    scales[1, 2] = scale
    codes = torch.zeros(300, 500, dtype=torch.uint8).view(FP8)
    with pytest.raises(ValueError, match=r"the scale of block 1, 2 is"):
        dequantise_into(codes[200:210, 300:310], scales, torch.empty(10, 10), row_start=200, column_start=300)
    dequantise_into(codes[256:], scales, torch.empty(44, 500), row_start=256)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.0e38])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_weight_that_no_code_stands_for_is_named(value, dtype):
    weight = torch.zeros(200, 9000, dtype=dtype)
    weight[190, 8999] = value
    with pytest.raises(ValueError, match="block 1, 70 holds a weight that is NaN, infinite or too large for FP8"):
        FP8_BLOCK.quantise(weight)


def test_tensors_that_do_not_belong_together_are_refused():
    codes, scales = torch.zeros(200, 300, dtype=torch.uint8).view(FP8), torch.ones(2, 3)
    for arguments, message in (
        ((codes, torch.ones(2, 2), BF16), r"have scales of \[2, 3\], and these are \[2, 2\]"),
        ((codes, torch.ones(2, 4), BF16), r"have scales of \[2, 3\], and these are \[2, 4\]"),
        ((codes[0], scales, BF16), "only a matrix has blocks"),
        ((codes.view(torch.uint8), scales, BF16), "codes in torch.uint8"),
        ((codes, scales, torch.float16), "cannot become torch.float16"),
        ((codes, scales.to(torch.int32), BF16), "scales in torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8_BLOCK.dequantise(*arguments)
    with pytest.raises(ValueError, match=r"there are \[2, 3\] scales where at least \[3, 3\] are needed"):
        dequantise_into(codes, scales, torch.empty(200, 300), row_start=57)
    with pytest.raises(ValueError, match=r"cannot become a weight of shape \[300, 200\]"):
        dequantise_into(codes, scales, torch.empty(300, 200))
    with pytest.raises(ValueError, match=r"a weight of shape \[3\] cannot become codes of shape \[3\]"):
        quantise_into(torch.ones(3), torch.zeros(3, dtype=FP8), torch.ones(1, 1))
    with pytest.raises(ValueError, match="a weight in torch"):
        FP8_BLOCK.quantise(torch.ones(3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"scales of shape \[2, 3\]"):
        quantise_into(torch.ones(128, 300), codes[:128], scales)
