"""HuggingFace checkpoints: folders with config.json and safetensors files."""

from converters.formats.safetensors.reader import HuggingFaceCheckpoint
from converters.formats.safetensors.writer import create_checkpoint, finish, open_for_writing, partial_folder

__all__ = ["HuggingFaceCheckpoint", "create_checkpoint", "finish", "open_for_writing", "partial_folder"]
