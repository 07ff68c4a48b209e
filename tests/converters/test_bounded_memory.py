"""The memory of a conversion: a process that may not take as much as one tensor converts all of them."""

import multiprocessing
import re
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from conversions import MODELS, architecture_of, convert, export, make, random_numbers, write_model

from converters.layouts.megatron import ParallelSizes

ROOM_BYTES = 96 * 1024**2
WIDE = {**MODELS["qwen3_tied"], "num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 2**16}
"""Three matrices of 134 MB."""
TP2 = ParallelSizes(world_size=2, tensor_model_parallel_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    shapes = architecture_of(WIDE).hf_shapes
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    assert max(each.nbytes for each in tensors.values()) > 1.3 * ROOM_BYTES
    # Modules, and objects made at their first use, are no part of a conversion.
    make(folder / "small", "qwen3_tied", draw=random_numbers)
    return write_model(folder / "wide", WIDE, tensors).parent


def both_ways(folder: Path, out: Path) -> None:
    convert(folder, out / "megatron", TP2)
    export(out / "megatron", out / "back")
    export(out / "megatron", out / "back_fp8", fp8=True)
    convert(out / "back_fp8", out / "megatron_again", TP2, dtype="bf16")


def convert_with_little_room(source: Path, out: Path) -> None:
    """In this process, for good: a limit to what it takes beyond what it has."""
    both_ways(source / "small", out / "small")
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    both_ways(source / "wide", out / "wide")
    with pytest.raises(RuntimeError, match="allocate memory"):
        torch.ones(2**16, 1024, dtype=torch.bfloat16)


def test_no_conversion_holds_a_whole_tensor(source, tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(convert_with_little_room, source, tmp_path).result()
