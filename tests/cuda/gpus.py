"""Parts that tests on GPUs share."""

import importlib.util

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test where there are not as many GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    return pytest.mark.skipif(
        found < count, reason=f"needs {words}, and torch sees {found or 'none'}: `make test-cuda` on a machine that has"
    )


def needs_capability(major: int, minor: int) -> pytest.MarkDecorator:
    """Skips a test on a GPU that is older."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (major, minor)
    wanted = f"needs a GPU of compute capability {major}.{minor}"
    return pytest.mark.skipif(found < (major, minor), reason=f"{wanted}, and this one has {found[0]}.{found[1]}")


def needs_package(name: str) -> pytest.MarkDecorator:
    """Skips a test where a package is not installed."""
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}, which is not installed: `make setup CUDA=1`")
