"""Program: quantise a tensor by SGLang's own functions, and codes with scales anew as SGLang does on Blackwell.

It runs in the environment that has SGLang: `python requantise_in_sglang.py FOLDER`, which has `given.pt`.
"""

import sys
from pathlib import Path

import torch

from megarl.rollout.sglang import cpu

cpu.corrections.install()

from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0  # noqa: E402 (what it needs is above)


def requantised(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales that `requant_weight_ue8m0` makes, which then packs the scales by a kernel of a GPU."""
    rows, columns = codes.shape
    # SGLang decodes by a kernel of a GPU, too: the product of code and scale, in bfloat16.
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return quant_weight_ue8m0((codes.float() * spread).to(torch.bfloat16), [128, 128])


folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt")
torch.save({name: requantised(*each) for name, each in given.items()}, folder / "made.pt")
