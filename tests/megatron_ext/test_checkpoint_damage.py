"""A checkpoint that is not what was written, or would run code, is refused by all ranks before any of it is used."""

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES as DAMAGES_OF_FILES
from damage import cases
from launch import run_ranks
from test_checkpoint import make_model, train

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.examine import verify
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import COMMON, METADATA, TorchDistCheckpoint
from converters.hf_to_megatron import convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from converters.manifest import MANIFEST, read_manifest, write_manifest
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import versions
from megatron_ext.checkpoint import checkpoint, checkpoint_folder
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions

EP2 = ParallelSizes(world_size=2, expert_model_parallel_size=2)


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run, with a manifest."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    folder = checkpoint_folder.begin(root, 1)
    run_ranks(train_and_save, EP2, source, folder)
    return checkpoint_folder.commit(root, 1, {"step": 1}, keep=1)


def train_and_save(rank: int, sizes: ParallelSizes, source: Path, folder: Path) -> None:
    model = make_model(rank, sizes, source)
    train(model, range(1))
    checkpoint.save(model, folder)


def test_the_manifest_covers_every_byte_and_no_tensor_was_read_for_it(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest is not None
    assert manifest.data_files == {path.name for path in saved.glob("*.distcp")}
    common = set() if versions.IS_0_19 else {COMMON}
    assert set(manifest.files) == {METADATA, "metadata.json", checkpoint_folder.CONTROLLER_STATE} | common
    for file in manifest.data_files:
        pieces = sorted(
            (place.offset, place.nbytes)
            for places in manifest.tensors.values()
            for place in places
            if place.file == file
        )
        end = 0
        for offset, nbytes in pieces:
            assert offset == end
            end += nbytes
        assert end == (saved / file).stat().st_size
    found = verify(saved, workers=1, progress=lambda _done, _total: None)
    assert found.by_manifest
    assert (found.is_intact, found.unlisted) == (True, [])


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 16
    path.write_bytes(content)


def flip_first(folder: Path) -> None:
    flip(sorted(folder.glob("*.distcp"))[0], 5)


def flip_last(folder: Path) -> None:
    path = sorted(folder.glob("*.distcp"))[-1]
    flip(path, path.stat().st_size - 1)


def flip_moment(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    name = next(name for name in manifest.tensors if name.startswith("optimizer.") and "exp_avg_sq" in name)
    (place,) = manifest.tensors[name]
    flip(folder / place.file, place.offset + place.nbytes // 2)


def renew_manifest(folder: Path) -> None:
    """As somebody would who means harm."""
    write_manifest(folder, {}, {"iteration": 1})


def run_code_in_metadata(folder: Path) -> None:
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    metadata.planner_data = Touch(folder.parent / "executed")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    renew_manifest(folder)


def run_code_in_common(folder: Path) -> None:
    torch.save({"args": Touch(folder.parent / "executed")}, folder / COMMON)
    renew_manifest(folder)


def run_code_in_an_object(folder: Path, name: str = "rng_state/shard_0_2") -> None:
    stored = TorchDistCheckpoint(folder).contents.objects[name]
    path = folder / "evil.distcp"
    torch.save(Touch(folder.parent / "executed"), path)
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        if (place.relative_path, place.offset) == (stored.file, stored.offset):
            place.relative_path, place.offset, place.length = path.name, 0, path.stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    renew_manifest(folder)


OF_COMMON: Mapping[str, tuple[Callable[[Path], None], str]] = (
    {"code in common_state": (partial(run_code_in_an_object, name="common_state/shard_0_1"), "no plain values")}
    if versions.IS_0_19
    else {"without common.pt": (lambda folder: (folder / COMMON).unlink(), "is damaged: common.pt is missing")}
)
DAMAGES: Mapping[str, tuple[Callable[[Path], None], str]] = {
    **OF_COMMON,
    "first bytes": (flip_first, "is damaged: .* in __0_0.distcp"),
    "last byte": (flip_last, "is damaged: .* in __1_"),
    "optimizer": (flip_moment, "is damaged: optimizer.*exp_avg_sq"),
    "without a file": (lambda folder: (folder / "__1_0.distcp").unlink(), "is damaged: __1_0.distcp is missing"),
    "code in common.pt": (run_code_in_common, "common.pt is missing, damaged or no plain values"),
    "code in an object": (run_code_in_an_object, "object rng_state/shard_0_2 is damaged or no plain values"),
}


def test_every_rank_refuses_what_is_damaged_and_nobody_runs_code(source: Path, saved: Path, tmp_path: Path) -> None:
    said = run_ranks(load_damaged, EP2, source, saved, tmp_path)
    for name, (_, message) in DAMAGES.items():
        for rank in said:
            assert rank[name] is not None, name
        texts = [rank[name] for rank in said]
        with pytest.raises(UserError, match=message):
            raise UserError(next(text for text in texts if text is not None))
    # An object that is no part of the table of contents is left out, and the rest of it is right.
    assert [rank["code in .metadata"] for rank in said] == [None, None]
    assert not list(tmp_path.rglob("executed"))


def load_damaged(rank: int, sizes: ParallelSizes, source: Path, saved: Path, scratch: Path) -> dict[str, str | None]:
    model = make_model(rank, sizes, source)
    said: dict[str, str | None] = {}
    for name, damage in {
        **{name: each for name, (each, _) in DAMAGES.items()},
        "code in .metadata": run_code_in_metadata,
    }.items():
        folder = scratch / name / "iter"
        if rank == 0:
            shutil.copytree(saved, folder)
            damage(folder)
        torch.distributed.barrier()
        said[name] = refused(partial(checkpoint.load, model, folder))
        torch.distributed.barrier()
    return said


def test_whatever_happened_to_a_file_no_run_goes_on_from_it(source: Path, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "iter")
    first, second = run_ranks(resume_from_damaged, EP2, source, tmp_path / "iter")
    assert first == second
    assert len(first) == len(DAMAGES_OF_FILES) * len(list(saved.iterdir()))
    assert [case for case, said in first.items() if said is None] == []


def resume_from_damaged(
    rank: int, sizes: ParallelSizes, source: Path, folder: Path
) -> dict[tuple[str, str], str | None]:
    """Sentences where a run resumes: by the controller before, and by the ranks."""
    model = make_model(rank, sizes, source)
    said: dict[tuple[str, str], str | None] = {}
    damages = list(cases(folder))
    good = {file: (folder / file).read_bytes() for file, _ in damages}
    for file, kind in damages:
        torch.distributed.barrier()
        if rank == 0:
            DAMAGES_OF_FILES[kind](folder / file)
        torch.distributed.barrier()
        said[file, kind] = refused(lambda: checkpoint_folder.read_controller_state(folder)) or refused(
            lambda: checkpoint.load(model, folder)
        )
        torch.distributed.barrier()
        if rank == 0:
            (folder / file).write_bytes(good[file])
    return said


def test_a_damaged_conversion_is_not_begun_with(source: Path, tmp_path: Path) -> None:
    """By its manifest, and without one by the checksums of torch."""
    convert_checkpoint(
        source,
        tmp_path / "megatron",
        ParallelSizes(),
        dtype="keep",
        vocabulary_multiple=1,
        workers=1,
        progress=lambda _done, _total: None,
    )
    found = read_manifest(tmp_path / "megatron")
    assert found is not None
    ((place,),) = [each for name, each in found.tensors.items() if name.startswith("decoder.final_layernorm")]
    flip(tmp_path / "megatron" / place.file, place.offset + 1)
    said = run_ranks(begin_with, EP2, source, tmp_path / "megatron")
    (tmp_path / "megatron" / MANIFEST).unlink()
    said += run_ranks(begin_with, EP2, source, tmp_path / "megatron")
    for each in said:
        assert each is not None
        assert "is damaged: " in each
        assert "decoder.final_layernorm" in each


def begin_with(rank: int, sizes: ParallelSizes, source: Path, folder: Path) -> str | None:
    options = MegatronOptions(sizes, torch.float32, optimizer={}, scheduler={})
    model = MegatronModel(read_architecture(HuggingFaceCheckpoint(source).config), options, rank)
    return refused(lambda: model.load_distributed(folder))


def refused(work: Callable[[], object]) -> str | None:
    try:
        work()
    except UserError as error:
        return str(error)
    return None
