"""Block FP8 with powers of two beside SGLang's own function that quantises weights anew on Blackwell."""

import pytest
import torch
from in_sglang import output_of

from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0


@pytest.mark.sglang
def test_what_sglang_quantises_anew_keeps_every_value(tmp_path):
    weight = torch.randn(4 * 128 + 64, 5 * 128, generator=torch.Generator().manual_seed(3))
    weight *= torch.logspace(-2, 4, 5).repeat_interleave(128)
    # Its largest is rounded to 224, half of the largest code, and others to subnormal codes.
    weight[:128, 128:256] = torch.logspace(-6, 0, 128) * 227
    formats = (FP8_BLOCK, FP8_BLOCK_UE8M0)
    given = {each.name: each.quantise(weight.to(torch.bfloat16)) for each in formats}
    torch.save(given, tmp_path / "given.pt")
    output_of("requantise_in_sglang.py", tmp_path)
    made = torch.load(tmp_path / "made.pt")
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
