"""Moving elements: from a checkpoint into the tensors of a rank, and from rank to rank."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from converters.boxes import Box
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layout import Placement, Shape


def check_tensors(local_shapes: Mapping[str, Shape], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `tensors` are those of a layout, by name and shape."""
    if different := sorted(local_shapes.keys() ^ tensors.keys()):
        where = "the layout" if different[0] in local_shapes else "the model"
        raise ValueError(f"only {where} has {different[0]}, one of {len(different)} tensors in which they differ")
    for name, shape in local_shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, in the layout {list(shape)}")


def read_into(
    checkpoint: HuggingFaceCheckpoint, placements: Sequence[Placement], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill the local `tensors` from the checkpoint, converting to their types; elements without a placement become 0.

    Reads no more of the checkpoint than the placements need. Raises ValueError for a tensor without any
    placement, and for a placement outside the tensors.
    """
    placed: Counter[str] = Counter()
    for placement in placements:
        placed[placement.local_name] += placement.local_box.size
    if without := sorted(tensors.keys() - placed.keys()):
        raise ValueError(f"nothing of the checkpoint belongs to {without[0]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if placed[name] < tensor.numel():
                tensor.zero_()
        for placement in placements:
            _view(tensors, placement.local_name, placement.local_box).copy_(
                checkpoint.read(placement.hf_name, placement.hf_box)
            )


def _view(tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"the layout places elements in {name}, which is not among the tensors")
    view = tensors[name][box.slices()]
    if view.shape != box.shape:
        raise ValueError(f"{box} leads out of {name}, which has shape {list(tensors[name].shape)}")
    return view
