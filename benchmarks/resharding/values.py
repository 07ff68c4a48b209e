"""Values that reveal a misplaced element: they are determined by HF name and position only."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from converters.layout import Layout, Placement, Shape
from converters.number_formats import FP8_BLOCK

WholeTensor = Callable[[str, Mapping[str, Shape], Mapping[str, torch.dtype]], Tensor]
"""Returns the tensor of a name, in a checkpoint with these shapes, from a model with these dtypes."""

# Odd and no power of two, so that a shift by a width of the model is never a multiple of the period.
_PERIOD = 2**22 - 3
_DEVIATION = 0.02
_CHANGED = 0.02


@cache
def _two_periods() -> Tensor:
    # Distributed like weights: of random bits 1 number in 256 is subnormal, and a core divides these much more slowly.
    random = torch.empty(_PERIOD).normal_(0, _DEVIATION, generator=torch.Generator().manual_seed(1))
    return random.to(torch.bfloat16).repeat(2)


def hf_values(name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The values of a HuggingFace tensor."""
    size = torch.Size(shape).numel()
    start = zlib.crc32(name.encode()) % _PERIOD
    period = _two_periods()[start : start + min(size, _PERIOD)]
    return period.repeat(-(-size // _PERIOD))[:size].view(shape).to(dtype)


def fill(layout: Layout, rank: int, tensors: Mapping[str, Tensor], hf_dtypes: Mapping[str, torch.dtype]) -> None:
    """Fill the `tensors` of a rank with their values."""
    for placement, values in _values(layout, rank, hf_dtypes, as_trained):
        tensors[placement.local_name][placement.local_box.slices()] = values


def as_trained(name: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """The values of a HuggingFace tensor, as a `WholeTensor`."""
    return hf_values(name, shapes[name], dtypes[name])


def in_fp8(name: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """A tensor of a block-FP8 checkpoint: codes, scales, or an unquantised one."""
    weight = name.removesuffix(FP8_BLOCK.scales_suffix)
    values = hf_values(weight, shapes[weight], dtypes[weight])
    if FP8_BLOCK.scales_name(weight) not in shapes:
        return values
    codes, scales = FP8_BLOCK.quantise(values)
    return codes if name == weight else scales


def wrong(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Tensor],
    hf_dtypes: Mapping[str, torch.dtype],
    whole_tensor: WholeTensor = as_trained,
) -> list[str]:
    """Names of the `tensors` of a rank that are not bit-identical to their values; padding is ignored."""
    found = []
    for placement, values in _values(layout, rank, hf_dtypes, whole_tensor):
        held = tensors[placement.local_name][placement.local_box.slices()].cpu()
        if held.dtype != values.dtype or not torch.equal(_bytes(held), _bytes(values)):
            found.append(placement.local_name)
    return sorted(set(found))


def wipe(tensors: Mapping[str, Tensor]) -> None:
    """Overwrite all with NaN, which differs from every value."""
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def change(tensors: Mapping[str, Tensor]) -> None:
    """Flip the last bit of 1 element in 50, always the same ones."""
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        words = tensor.view(-1).view(torch.int16)
        words ^= (torch.rand(len(words), generator=generator) < _CHANGED).to(torch.int16)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _values(
    layout: Layout, rank: int, hf_dtypes: Mapping[str, torch.dtype], whole_tensor: WholeTensor
) -> Iterator[tuple[Placement, Tensor]]:
    placements: Sequence[Placement] = sorted(layout.placements(rank), key=lambda placement: placement.hf_name)
    for name, of_tensor in groupby(placements, key=lambda placement: placement.hf_name):
        whole = whole_tensor(name, layout.hf_shapes, hf_dtypes)
        for placement in of_tensor:
            yield placement, whole[placement.hf_box.slices()]
