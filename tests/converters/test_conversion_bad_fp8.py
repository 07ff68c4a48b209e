"""Codes and scales that do not fit together, and weights that block FP8 cannot hold, are one clear sentence."""

import pytest
import torch
from changed_folders import O_PROJ
from conversions import BF16, FP8, FP32, MODELS, convert, export, random_numbers, random_tensors, write_model
from refusal import assert_refused


def fp8_model() -> dict[str, torch.Tensor]:
    tensors = random_tensors(MODELS["qwen3"], draw=random_numbers)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
        tensors[name] = tensors[name].to(FP8)
    return tensors


SCALES = f"{O_PROJ}_scale_inv"
FP8_CHANGES = {
    "no scales": ({SCALES: None}, f"holds {O_PROJ} in FP8 without its scales {SCALES}"),
    "scales of another shape": ({SCALES: torch.ones(2, 1)}, rf"holds the scales {SCALES} .*shape \[2, 1\], where"),
    "scales of one dimension": ({SCALES: torch.ones(1)}, rf"holds the scales {SCALES} .*shape \[1\], where"),
    "scales of another type": ({SCALES: torch.ones(1, 1).half()}, f"holds the scales {SCALES} in torch.float16"),
    "scales of nothing": ({O_PROJ: torch.zeros(8, 16, dtype=BF16)}, f"holds the scales {SCALES}, but no tensor"),
    "another FP8": ({O_PROJ: torch.zeros(8, 16, dtype=torch.float8_e5m2)}, f"holds {O_PROJ} in torch.float8_e5m2"),
    "a vector": ({"model.norm.weight": torch.zeros(8, dtype=FP8)}, r"holds model.norm.weight in FP8 with shape \[8\]"),
    "codes of another shape": ({O_PROJ: torch.zeros(16, 8, dtype=FP8)}, rf"holds {O_PROJ} with shape \[16, 8\]"),
    "a code that is no number": (
        {O_PROJ: torch.full((8, 16), torch.nan).to(FP8)},
        f"holds {O_PROJ} with the code in row 0, column 0 is NaN",
    ),
    "a scale that is no number": ({SCALES: torch.full((1, 1), torch.nan)}, f"holds {O_PROJ} with the scale .* is nan"),
    "a scale that is infinite": ({SCALES: torch.full((1, 1), torch.inf)}, f"holds {O_PROJ} with the scale .* is inf"),
}


@pytest.mark.parametrize("name", FP8_CHANGES)
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_fp8_that_does_not_fit_together_is_refused(name, dtype, tmp_path):
    changes, message = FP8_CHANGES[name]
    tensors = {key: each for key, each in {**fp8_model(), **changes}.items() if each is not None}
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    assert_refused(convert, tmp_path / "hf", tmp_path / "there/out", message, dtype=dtype, workers=2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_weights_that_fp8_cannot_hold_are_named(value, tmp_path):
    tensors = random_tensors(MODELS["qwen3"], dtype=FP32, draw=random_numbers)
    tensors[O_PROJ][3, 5] = value
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    convert(tmp_path / "hf", tmp_path / "megatron")
    message = f"{O_PROJ} cannot be written in FP8: block 0, 0 holds a weight that is NaN, infinite or too large"
    assert_refused(export, tmp_path / "megatron", tmp_path / "there/out", message, fp8=True)
    export(tmp_path / "megatron", tmp_path / "there/out")
