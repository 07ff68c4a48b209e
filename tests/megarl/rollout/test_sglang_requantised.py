"""Block FP8 with powers of two beside SGLang's own function that quantises weights anew on Blackwell."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0
from megarl.rollout.sglang.installation import installation

PROGRAM = Path(__file__).parent / "requantise_in_sglang.py"


def in_sglang(folder, given):
    python, paths = installation()
    torch.save(given, folder / "given.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    subprocess.run([python, PROGRAM, folder], env=environment, check=True, timeout=200)
    return torch.load(folder / "made.pt")


@pytest.mark.sglang
def test_what_sglang_quantises_anew_keeps_every_value(tmp_path):
    weight = torch.randn(4 * 128 + 64, 5 * 128, generator=torch.Generator().manual_seed(3))
    weight *= torch.logspace(-2, 4, 5).repeat_interleave(128)
    # Its largest is rounded to 224, half of the largest code, and others to subnormal codes.
    weight[:128, 128:256] = torch.logspace(-6, 0, 128) * 227
    formats = (FP8_BLOCK, FP8_BLOCK_UE8M0)
    given = {each.name: each.quantise(weight.to(torch.bfloat16)) for each in formats}
    made = in_sglang(tmp_path, given)
    same = {
        each.name: torch.equal(
            each.dequantise(*given[each.name], torch.float32), each.dequantise(*made[each.name], torch.float32)
        )
        for each in formats
    }
    assert same == {"fp8_block": False, "fp8_block_ue8m0": True}
    codes, scales = (made[FP8_BLOCK_UE8M0.name][part].contiguous().view(torch.uint8) for part in (0, 1))
    expected = [each.contiguous().view(torch.uint8) for each in given[FP8_BLOCK_UE8M0.name]]
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
