"""HuggingFace checkpoints: folders with config.json and safetensors files."""

from converters.formats.safetensors.header import place_tensors
from converters.formats.safetensors.reader import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.safetensors.side_files import (
    copy_side_files,
    main_dtype,
    stated_dtype,
    unquantised,
    with_dtype,
    write_config,
)
from converters.formats.safetensors.writer import (
    create_checkpoint,
    cut_into_files,
    finish,
    open_for_writing,
    partial_folder,
    write_index,
)

__all__ = [
    "CONFIG",
    "HuggingFaceCheckpoint",
    "copy_side_files",
    "create_checkpoint",
    "cut_into_files",
    "finish",
    "main_dtype",
    "open_for_writing",
    "partial_folder",
    "place_tensors",
    "read_json",
    "stated_dtype",
    "unquantised",
    "with_dtype",
    "write_config",
    "write_index",
]
