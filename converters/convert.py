"""Moving elements: from a checkpoint into the tensors of a rank, and from rank to rank."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from converters.architectures import Architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layout import Placement, Shape
from converters.plan import Transfer

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_checkpoint(checkpoint: HuggingFaceCheckpoint, architecture: Architecture) -> None:
    """Raise UserError unless the checkpoint holds the tensors of `architecture`, complete and in their shapes.

    Copies of a tied or shared weight are accepted where they equal it, and tensors that nothing reads.
    """
    for name, dtype in checkpoint.dtypes.items():
        if dtype in _FLOAT8:
            raise UserError(f"{checkpoint.folder} holds {name} in FP8; give the model in bf16 or fp32")
    expected = dict(architecture.hf_shapes)
    shapes = checkpoint.shapes
    expected |= {copy: expected[original] for copy, original in architecture.hf_copies.items() if copy in shapes}
    expected |= {name: shapes[name] for name in architecture.hf_unused if name in shapes}
    if architecture.mtp_layers and not any(
        name.startswith(f"model.layers.{architecture.num_layers}.") for name in shapes
    ):
        # transformers leaves them out when it saves a model, but not their number.
        raise UserError(
            f"{checkpoint.folder} holds nothing of the {architecture.mtp_layers} multi-token-prediction layers of its"
            " config.json; set num_nextn_predict_layers to 0 there"
        )
    checkpoint.check(expected)
    for copy, original in architecture.hf_copies.items():
        whole = Box.whole(expected[original])
        if copy in expected and not torch.equal(checkpoint.read(copy, whole), checkpoint.read(original, whole)):
            raise UserError(
                f"{checkpoint.folder} holds {copy} with other values than {original}, of which config.json makes it a"
                " copy; set tie_word_embeddings to false if that is wrong, or delete one of them"
            )


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


def copy_transfers(
    transfers: Iterable[Transfer], sources: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]
) -> None:
    """Carry out transfers whose two ranks' tensors are both at hand, converting to the destinations' types.

    Raises ValueError for a box that is not within its tensor, or a tensor that is not there.
    """
    with torch.no_grad():
        for transfer in transfers:
            source = _view(sources, transfer.source_name, transfer.source_box)
            _view(destinations, transfer.destination_name, transfer.destination_box).copy_(source)
