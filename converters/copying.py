"""Copies elements from a checkpoint into a rank's tensors, and from rank to rank."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from converters.architectures import Architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.formats.peft import refuse_adapter_checkpoint
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import is_block_fp8, scales_of, scales_shape
from converters.layout import Placement, Shape
from converters.layouts.torch_dist import stored_pieces
from converters.plan import Transfer
from converters.stream.sources import HuggingFaceSource

_COMPARED_ELEMENTS = 2**20


def check_checkpoint(checkpoint: HuggingFaceCheckpoint, architecture: Architecture) -> None:
    """Raise UserError unless the checkpoint holds the tensors of `architecture`, complete and in their shapes.

    The dtypes must be floating-point. The checkpoint may also have copies of a tied or shared weight that equal it,
    FP8 tensors with scales, and tensors that nothing reads. Tensors that are zero if missing may be missing.
    """
    check_structure(checkpoint, architecture)
    check_copies(checkpoint, architecture)


def check_copies(checkpoint: HuggingFaceCheckpoint, architecture: Architecture) -> None:
    """Raise UserError for a copy of a tied or shared weight with other values. Reads gigabytes for a large model."""
    shapes = checkpoint.shapes
    for copy, original in architecture.hf_copies.items():
        if copy in shapes and not _equal(checkpoint, copy, original, shapes[original]):
            raise UserError(
                f"{checkpoint.folder} holds {copy} with other values than {original}, of which config.json makes it a"
                " copy; set tie_word_embeddings to false if that is wrong, or delete one of them"
            )


def check_structure(checkpoint: HuggingFaceCheckpoint, architecture: Architecture) -> None:
    """`check_checkpoint` without comparing the values of copies. Raises as it does."""
    is_block_fp8(checkpoint.config)  # refuses other kinds of quantisation
    shapes = checkpoint.shapes
    missing = architecture.hf_zero_if_missing - shapes.keys()
    expected = {name: shape for name, shape in architecture.hf_shapes.items() if name not in missing}
    expected |= {copy: expected[original] for copy, original in architecture.hf_copies.items() if copy in shapes}
    _check_types(checkpoint, expected)
    expected |= {name: shapes[name] for name in architecture.hf_unused if name in shapes}
    for name, scales in scales_of(checkpoint.folder, shapes, checkpoint.dtypes).items():
        if name in expected:
            expected[scales] = scales_shape(expected[name])
    if architecture.mtp_layers and not any(
        name.startswith(f"model.layers.{architecture.num_layers}.") for name in shapes
    ):
        # transformers drops these layers when it saves a model, but not their number in config.json.
        raise UserError(
            f"{checkpoint.folder} holds nothing of the {architecture.mtp_layers} multi-token-prediction layers of its"
            " config.json; set num_nextn_predict_layers to 0 there"
        )
    checkpoint.check(expected)


def _check_types(checkpoint: HuggingFaceCheckpoint, weights: Iterable[str]) -> None:
    dtypes = checkpoint.dtypes
    for name in weights:
        if name in dtypes and not dtypes[name].is_floating_point:
            # Most likely the codes of an unknown quantisation, with scales that are not understood here.
            raise UserError(
                f"{checkpoint.folder} holds {name} in {dtypes[name]}; weights are read in floating types only: give the"
                " model in bf16"
            )


def _equal(checkpoint: HuggingFaceCheckpoint, name: str, other: str, shape: Shape) -> bool:
    """Whether two tensors are equal; compares piece by piece, to save memory."""
    rows = max(1, _COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        box = Box((start, *(0 for _ in shape[1:])), (min(start + rows, shape[0]), *shape[1:]))
        first, second = checkpoint.read(name, box), checkpoint.read(other, box)
        # Compare bytes, so that equal NaNs count as equal.
        if first.dtype != second.dtype or not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return False
    return True


def check_distributed(checkpoint: TorchDistCheckpoint, architecture: Architecture) -> None:
    """Raise UserError unless the checkpoint holds the tensors of `architecture`, complete and in their shapes."""
    refuse_adapter_checkpoint(checkpoint.folder)
    shapes = {key: stored.shape for key, stored in checkpoint.weights.items()}
    for _ in stored_pieces(architecture, shapes, dict.fromkeys(shapes, ())):
        pass
    for key, stored in checkpoint.weights.items():
        held, size = sum(chunk.box.size for chunk in stored.chunks), math.prod(stored.shape)
        if held != size:
            raise UserError(f"the checkpoint holds {held} of the {size} elements of {key}; copy it again")


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

    Reads no more of the checkpoint than the placements need, and decodes FP8. Raises ValueError for a tensor without
    any placement, and for a placement outside of its tensor.
    """
    source = HuggingFaceSource(checkpoint)
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
            view = _view(tensors, placement.local_name, placement.local_box)
            source.copy_into(view, placement.hf_name, placement.hf_box)


def _view(tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"the layout places elements in {name}, which is not among the tensors")
    view = tensors[name][box.slices()]
    if view.shape != box.shape:
        raise ValueError(f"{box} leads out of {name}, which has shape {list(tensors[name].shape)}")
    return view


def copy_transfers(
    transfers: Iterable[Transfer], sources: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]
) -> None:
    """Execute transfers between tensors in this process, converting to the destinations' dtypes.

    Raises ValueError for a box that exceeds its tensor, or for a missing tensor.
    """
    with torch.no_grad():
        for transfer in transfers:
            source = _view(sources, transfer.source_name, transfer.source_box)
            _view(destinations, transfer.destination_name, transfer.destination_box).copy_(source)
