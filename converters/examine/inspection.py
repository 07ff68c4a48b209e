"""Describes a checkpoint: model, tensors, file layout, and completeness."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from converters.architectures import Architecture, Part, read_architecture
from converters.copying import check_structure
from converters.dtypes import dtype_name
from converters.errors import UserError
from converters.examine.opening import Checkpoint, config_of, open_checkpoint, root_of
from converters.examine.weights import MegatronWeights
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import CODES, SCALES_SUFFIX
from converters.layout import Shape
from converters.manifest import MANIFEST

HUGGINGFACE_FORMAT, TORCH_DIST_FORMAT = "HuggingFace", "Megatron torch_dist"
_PARALLEL_ARGUMENTS = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


@dataclass(frozen=True)
class Model:
    """Model of a config.json."""

    model_type: str
    layers: int
    mtp_layers: int
    """Multi-token prediction layers, which `layers` does not include."""
    experts: int
    """Routed experts of a layer; 0 without a mixture of experts."""
    tied: bool
    parameters: int
    """Parameters of the whole model, with multi-token prediction; the shared weights of tied layers count once."""
    parameters_per_token: int
    """Parameters that a token uses: without inactive experts and multi-token prediction."""


@dataclass(frozen=True)
class FileLayout:
    """How the tensors are stored in files."""

    files: int
    chunks: int
    """Pieces in which the tensors are stored; in safetensors one per tensor."""
    largest_chunk_bytes: int
    parallel: Mapping[str, int] = field(default_factory=dict)
    """The parallel sizes with which a torch_dist checkpoint was saved, by its own account: TP, PP, VPP, EP, ETP."""
    iteration: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Description of a checkpoint. Nothing in it comes from the values of the tensors."""

    folder: str
    format: str
    model: Model | None
    """None without a config.json of a supported architecture."""
    elements: int
    """Elements of all weights as stored: with copies of shared weights and padding, without the scales of FP8."""
    tensors: int
    nbytes: int
    """Size of the weights as stored."""
    dtypes: Mapping[str, tuple[int, int]]
    """Type -> number of tensors and bytes."""
    layout: FileLayout
    is_fp8: bool
    optimizer_bytes: int
    """Size of a torch_dist checkpoint's tensors other than weights."""
    manifest: bool
    """Whether there is a manifest with checksums."""
    problem: str | None
    """Reason why the tensors are not exactly those of config.json; None if they are."""


def inspect(folder: Path, *, hf_config_folder: Path | None = None) -> Inspection:
    """Describe a checkpoint of either kind, without reading its values.

    config.json is that in `hf_config_folder`, else the checkpoint's own. Raises UserError if there is no checkpoint, or
    its tables of contents are damaged.
    """
    checkpoint = open_checkpoint(folder)
    config = read_json(hf_config_folder / CONFIG) if hf_config_folder else config_of(checkpoint)
    architecture, problem = _architecture(config)
    if architecture:
        problem = _problem(checkpoint, architecture)
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        dtype_of = checkpoint.dtypes
        stored = [(shape, dtype_of[name], name) for name, shape in checkpoint.shapes.items()]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in stored]
        layout = FileLayout(len(checkpoint.files), len(sizes), max(sizes, default=0))
        kind, optimizer_bytes = HUGGINGFACE_FORMAT, 0
    else:
        kind, layout, optimizer_bytes = TORCH_DIST_FORMAT, _torch_dist_layout(checkpoint), _beside_weights(checkpoint)
        stored = [(tensor.shape, tensor.dtype, key) for key, tensor in checkpoint.weights.items()]
    dtypes = _by_dtype((shape, dtype) for shape, dtype, _ in stored)
    return Inspection(
        folder=str(folder),
        format=kind,
        model=_model(architecture) if architecture else None,
        elements=sum(math.prod(shape) for shape, _, name in stored if not name.endswith(SCALES_SUFFIX)),
        tensors=len(stored),
        nbytes=sum(nbytes for _, nbytes in dtypes.values()),
        dtypes=dtypes,
        layout=layout,
        is_fp8=any(dtype is CODES for _, dtype, _ in stored),
        optimizer_bytes=optimizer_bytes,
        manifest=(root_of(checkpoint) / MANIFEST).is_file(),
        problem=problem,
    )


def _architecture(config: Mapping[str, Any] | None) -> tuple[Architecture | None, str | None]:
    if config is None:
        return None, f"there is no {CONFIG} to say which tensors there should be"
    try:
        return read_architecture(config), None
    except UserError as error:
        return None, str(error)


def _problem(checkpoint: Checkpoint, architecture: Architecture) -> str | None:
    try:
        if isinstance(checkpoint, HuggingFaceCheckpoint):
            check_structure(checkpoint, architecture)
        else:
            MegatronWeights(checkpoint, architecture)
    except UserError as error:
        return str(error)
    return None


def _model(architecture: Architecture) -> Model:
    total, per_token = 0, 0.0
    used = architecture.transformer_config.get("moe_router_topk", 0)
    for parameter in architecture.weight_map:
        if parameter.part is Part.COPY_ON_LAST:
            continue
        shapes = architecture.dimensions_of(parameter)
        elements = sum(math.prod(dimension.size for dimension in shape) for shape in shapes)
        elements *= len(parameter.layers) if parameter.part in (Part.LAYERS, Part.MTP) else 1
        total += elements * (architecture.num_experts if parameter.is_expert else 1)
        if parameter.part is not Part.MTP:
            per_token += elements * (used if parameter.is_expert else 1)
    return Model(
        model_type=architecture.model_type,
        layers=architecture.num_layers,
        mtp_layers=architecture.mtp_layers,
        experts=architecture.num_experts,
        tied=architecture.gpt_model["share_embeddings_and_output_weights"],
        parameters=total,
        parameters_per_token=int(per_token),
    )


def _torch_dist_layout(checkpoint: TorchDistCheckpoint) -> FileLayout:
    chunks = [chunk for tensor in checkpoint.weights.values() for chunk in tensor.chunks]
    # A checkpoint saved by hand may have none.
    common = checkpoint.common if checkpoint.common_place else {}
    arguments = getattr(common.get("args"), "__dict__", {})
    iteration = common.get("iteration")
    return FileLayout(
        files=len({chunk.file for tensor in checkpoint.contents.tensors.values() for chunk in tensor.chunks}),
        chunks=len(chunks),
        largest_chunk_bytes=max((chunk.length for chunk in chunks), default=0),
        parallel={
            short: arguments[name]
            for name, short in _PARALLEL_ARGUMENTS.items()
            if isinstance(arguments.get(name), int)
        },
        iteration=iteration if isinstance(iteration, int) else None,
    )


def _beside_weights(checkpoint: TorchDistCheckpoint) -> int:
    tensors = checkpoint.contents.tensors
    return sum(tensor.nbytes for key, tensor in tensors.items() if key not in checkpoint.weights)


def _by_dtype(tensors: Iterable[tuple[Shape, torch.dtype]]) -> dict[str, tuple[int, int]]:
    counted: dict[str, tuple[int, int]] = {}
    for shape, dtype in tensors:
        name = dtype_name(dtype)
        number, nbytes = counted.get(name, (0, 0))
        counted[name] = number + 1, nbytes + math.prod(shape) * dtype.itemsize
    return counted
