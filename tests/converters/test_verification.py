"""Every byte of a checkpoint that megarl wrote has a checksum; of others, what torch keeps a checksum of."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conversions import convert, export, make, no_progress, random_numbers

from converters.errors import UserError
from converters.examine import Verification, verify
from converters.layouts.megatron import ParallelSizes
from converters.manifest import MANIFEST
from converters.manifest.content import sealed


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A model, its conversion and its export."""
    folder = tmp_path_factory.mktemp("written")
    make(folder / "model", "deepseek_v3", draw=random_numbers)
    convert(folder / "model", folder / "megatron", ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    export(folder / "megatron", folder / "huggingface", fp8=True, shard_size_bytes=2_000)
    return folder


@pytest.fixture
def copy(written, tmp_path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def check(folder: Path, workers: int = 2) -> Verification:
    return verify(folder, workers=workers, progress=no_progress)


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def places_of(folder: Path) -> dict[str, list[list]]:
    return json.loads((folder / MANIFEST).read_text())["tensors"]


@pytest.mark.parametrize("name", ["megatron", "huggingface"])
def test_what_was_written_is_intact(written, name):
    done: list[tuple[int, int]] = []
    found = verify(written / name, workers=2, progress=lambda *both: done.append(both))
    assert found.is_intact
    assert found.by_manifest
    assert found.checked == len(places_of(written / name))
    assert found.files == len([path for path in (written / name).rglob("*") if path.is_file()]) - 1
    assert done[-1] == (found.nbytes, found.nbytes)
    assert (found.damaged, found.missing, found.unlisted) == ([], [], [])


def test_the_folder_of_the_weights_alone_is_enough(written):
    assert check(written / "megatron/release").by_manifest


@pytest.mark.parametrize("name", ["megatron", "huggingface"])
def test_a_bit_anywhere_is_noticed(copy, name):
    """In every file, at its ends and at some places in between."""
    folder = copy / name
    for file in [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]:
        content = file.read_bytes()
        for offset in {0, len(content) - 1, *range(7, len(content), max(1, len(content) // 9))}:
            flip(file, offset)
            damaged = check(folder).damaged
            assert len(damaged) == 1, (file, offset)
            assert str(file.relative_to(folder)) in damaged[0]
            file.write_bytes(content)


def test_the_damaged_tensor_is_named(copy):
    folder = copy / "megatron"
    name, ((file, offset, nbytes, _),) = next(iter(places_of(folder).items()))
    flip(folder / file, offset + nbytes - 1)
    assert check(folder).damaged == [f"{name} in {file}"]


def test_damaged_scales_are_named_by_their_weight(copy):
    folder = copy / "huggingface"
    name, (_, (file, offset, *_)) = next(item for item in places_of(folder).items() if len(item[1]) == 2)
    flip(folder / file, offset)
    assert check(folder).damaged == [f"{name} in {file}"]


def test_a_file_that_became_longer_shorter_or_went(copy):
    folder = copy / "huggingface"
    first, second, third = sorted(folder.glob("*.safetensors"))[:3]
    first.write_bytes(first.read_bytes() + b"x")
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    (folder / "model-new.safetensors").write_bytes(b"")
    found = check(folder)
    assert not found.is_intact
    assert found.missing == [third.name]
    assert found.unlisted == ["model-new.safetensors"]
    assert any(first.name in each for each in found.damaged)
    assert any(second.name in each for each in found.damaged)
    assert not any(third.name in each for each in found.damaged)


def test_files_beside_the_checkpoint_are_named_and_no_damage(copy):
    (copy / "megatron/README.md").write_text("mine")
    found = check(copy / "megatron")
    assert found.is_intact
    assert found.unlisted == ["README.md"]


def test_a_manifest_cannot_lead_out_of_its_folder(copy):
    manifest = copy / "huggingface" / MANIFEST
    content = json.loads(manifest.read_text().replace('"config.json"', '"../model/config.json"'))
    del content["crc32"]
    manifest.write_bytes(sealed(content))
    with pytest.raises(UserError, match=r"../model/config.json leads out of the folder"):
        check(copy / "huggingface")


def test_a_folder_of_another_program_has_no_checksums(written):
    with pytest.raises(UserError, match=r"model has no checksums: .* without megarl_manifest\.json.* by megarl diff$"):
        check(written / "model")


def test_without_a_manifest_the_checksums_of_torch_are_compared(copy):
    folder = copy / "megatron"
    name, ((file, offset, *_),) = next(iter(places_of(folder).items()))
    (folder / MANIFEST).unlink()
    found = check(folder)
    assert found.is_intact
    assert not found.by_manifest
    key, _, start = name.partition("@")
    content = (folder / file).read_bytes()
    flip(folder / file, offset)
    assert check(folder).damaged == [f"the chunk of {key} at [{start.replace(',', ', ')}] in {Path(file).name}"]
    (folder / file).write_bytes(content.replace(b"PK\3\4", b"PK\3\5", 1))
    assert len(check(folder).damaged) == 1


def test_what_a_run_saved_after_a_conversion_is_not_in_the_manifest(copy):
    folder = copy / "megatron"
    shutil.copytree(folder / "release", folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    assert not check(folder).by_manifest
    assert not check(folder / "iter_0000007").by_manifest
    assert check(folder / "release").by_manifest


def save_by_torch(folder: Path, **state: object) -> Path:
    """A checkpoint written by torch itself, in one process."""
    writer = torch.distributed.checkpoint.FileSystemWriter(folder)
    torch.distributed.checkpoint.save(dict(state), storage_writer=writer, no_dist=True)
    return folder


def test_a_checkpoint_of_torch_is_verified_with_its_optimizer_and_objects(tmp_path):
    state = {"a": torch.arange(64.0), "optimizer.state.a": torch.ones(64), "rng_state": "seed" * 100}
    folder = save_by_torch(tmp_path / "saved", **state)
    found = check(folder)
    assert found.is_intact
    assert (found.checked, found.without_checksum) == (3, 0)
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    wanted = [(b"seed", "the object rng_state"), (torch.ones(2).numpy().tobytes(), "the chunk of optimizer.state.a")]
    for piece, said in wanted:
        flip(file, content.index(piece) + 1)
        assert [each.startswith(said) for each in check(folder).damaged] == [True]
        file.write_bytes(content)


def test_torch_may_have_written_no_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        folder = save_by_torch(tmp_path / "saved", a=torch.arange(64.0))
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(UserError, match=r"saved has no checksums, since torch wrote it with those turned off"):
        check(folder)
