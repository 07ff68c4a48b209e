"""Distributed checkpoints as other programs save them with megatron-core: options, types and layouts of their own."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from distinct_vectors import with_distinct_vectors
from launch import run_in_turn
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from parity import loaded_model
from torch.distributed import checkpoint as dcp

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint, read_metadata
from converters.layouts.megatron import ParallelSizes
from converters.megatron_to_hf import export_checkpoint
from megatron_ext.model.model import local_tensors

pytestmark = pytest.mark.long

TP2 = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
UNEVEN = ParallelSizes(world_size=2, pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)
OPTIONS = ("as it is", "bf16", "without checksums", "in parallel")
# An option changes the same at every layout.
LAYOUTS = {"TP2": (TP2, OPTIONS), "PP2 uneven": (UNEVEN, OPTIONS[:1])}
MODELS = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: with_distinct_vectors(tiny_models[name], root / name) for name in MODELS}


@pytest.fixture(scope="module")
def saved(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it a folder for each layout, with one for each of its options, with one for each model."""
    root = tmp_path_factory.mktemp("saved")
    run_in_turn([(save, sizes, models, options, root / layout) for layout, (sizes, options) in LAYOUTS.items()])
    return root


def save(rank: int, sizes: ParallelSizes, models: Mapping[str, Path], options: Sequence[str], root: Path) -> None:
    for name, folder in models.items():
        (chunk,) = loaded_model(rank, sizes, folder)
        for option in options:
            target = root / option / name
            target.mkdir(parents=True, exist_ok=True)
            torch.distributed.barrier()
            if option == "bf16":
                for tensor in local_tensors([chunk]).values():
                    tensor.data = tensor.data.bfloat16()
            strategy = get_default_save_sharded_strategy()
            if option == "in parallel":
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                strategy = FullyParallelSaveStrategyWrapper(strategy, group)
            torch.serialization.set_crc32_options(option != "without checksums")
            dist_checkpointing.save({**chunk.sharded_state_dict(), "iteration": 7}, str(target), strategy)


def cases(saved: Path) -> list[tuple[str, Path]]:
    return [(path.name, path) for path in sorted(saved.glob("*/*/*"))]


def exported(stored: Path, source: Path, target: Path) -> HuggingFaceCheckpoint:
    export_checkpoint(
        stored,
        target,
        hf_config_folder=source,
        fp8=False,
        shard_size_bytes=10**9,
        workers=1,
        progress=lambda _done, _total: None,
    )
    return HuggingFaceCheckpoint(target)


def test_what_megatron_saved_exports_to_the_model_it_was(
    models: Mapping[str, Path], saved: Path, tmp_path: Path
) -> None:
    assert len(cases(saved)) == sum(len(options) for _, options in LAYOUTS.values()) * len(MODELS)
    for number, (name, stored) in enumerate(cases(saved)):
        original = HuggingFaceCheckpoint(models[name])
        found = exported(stored, models[name], tmp_path / str(number))
        assert found.shapes == original.shapes
        # With the option bf16 the same model was saved.
        dtype = torch.float32 if stored.parent.name == "as it is" else torch.bfloat16
        for tensor, shape in original.shapes.items():
            whole = Box.whole(shape)
            expected = original.read(tensor, whole).to(dtype)
            assert found.dtypes[tensor] == dtype
            assert torch.equal(found.read(tensor, whole), expected), (stored, tensor)


def test_every_chunk_is_where_torch_finds_it(saved: Path) -> None:
    for _, stored in cases(saved):
        checkpoint = TorchDistCheckpoint(stored)
        theirs = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in checkpoint.weights.items()}
        dcp.load(theirs, storage_reader=dcp.FileSystemReader(stored), no_dist=True)
        for key, each in checkpoint.weights.items():
            for chunk in each.chunks:
                assert torch.equal(checkpoint.read(key, chunk), theirs[key][chunk.box.slices()]), (stored, key)
        assert checkpoint.common["iteration"] == 7


def test_checksums_are_those_of_torch_or_none(saved: Path) -> None:
    for name in MODELS:
        for option, expected in (("as it is", True), ("without checksums", False)):
            checkpoint = TorchDistCheckpoint(saved / "TP2" / option / name)
            found = [
                checkpoint.checksum_data(key, chunk)[1]
                for key, each in checkpoint.weights.items()
                for chunk in each.chunks
            ]
            assert all(found) if expected else not any(found)


def test_a_flipped_bit_of_a_frame_is_refused(models: Mapping[str, Path], saved: Path, tmp_path: Path) -> None:
    source = saved / "TP2/as it is/qwen3"
    stored = tmp_path / "stored"
    stored.mkdir()
    for path in source.iterdir():
        (stored / path.name).write_bytes(path.read_bytes())
    chunk = read_metadata(source).tensors["decoder.final_layernorm.weight"].chunks[0]
    content = bytearray((stored / chunk.file).read_bytes())
    blob = bytes(content[chunk.offset : chunk.offset + chunk.length])
    assert torch.load(io.BytesIO(blob), weights_only=True).shape == chunk.box.shape
    content[chunk.offset + blob.index(b"data.pkl") + len(b"data.pkl") + 40] ^= 1
    (stored / chunk.file).write_bytes(content)
    with pytest.raises(UserError, match=r"chunk of decoder.final_layernorm.weight at \[0\]"):
        exported(stored, models["qwen3"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["stored"]
