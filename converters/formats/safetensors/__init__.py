"""HuggingFace checkpoints: folders with config.json and safetensors files."""

from converters.formats.safetensors.reader import HuggingFaceCheckpoint

__all__ = ["HuggingFaceCheckpoint"]
