"""A mapped file takes no descriptor and no promise of memory, lives as long as somebody looks, and never changes."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from converters.formats.mapped_file import MappedFile
from converters.formats.safetensors.header import map_tensors, place_tensors, read_header

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def mappings(path: Path) -> list[str]:
    """How this process has mapped a file: what may be done with the pages, and whether they are its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(path))]


def is_open(path: Path) -> bool:
    return any(os.path.realpath(each) == str(path) for each in Path("/proc/self/fd").iterdir())


def test_the_bytes_of_a_file(path):
    mapped = MappedFile(path)
    assert bytes(mapped.view) == CONTENT
    assert mapped[300:520] == CONTENT[300:520]
    assert mapped[len(CONTENT) - 3 : len(CONTENT) + 9] == CONTENT[-3:]
    assert bytes(mapped.tensor(256, 8).tolist()) == CONTENT[:8]


def test_an_empty_file_has_none(tmp_path):
    (tmp_path / "file").touch()
    assert MappedFile(tmp_path / "file")[0:10] == b""


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        MappedFile(tmp_path / "file")
    assert str(caught.value.filename) == str(tmp_path / "file")


def test_what_cannot_be_mapped_is_named(path):
    with pytest.raises(OSError, match="No such device") as caught:
        MappedFile(path.parent)  # a folder, which can be opened
    assert caught.value.filename == str(path.parent)


def test_it_is_not_open_and_nobody_can_write_to_it(path):
    mapped = MappedFile(path)
    assert mappings(path) == ["r--s"]
    assert not is_open(path)
    assert mapped.view.readonly


def test_views_of_checkpoints_are_such_files(tmp_path):
    start, _ = place_tensors({"a": (4,)}, {"a": torch.float32})
    (tmp_path / "file").write_bytes(start + bytes(16))
    views = map_tensors(tmp_path / "file", read_header(tmp_path / "file"), writable=False)
    assert views["a"].tolist() == [0, 0, 0, 0]
    assert mappings(tmp_path / "file") == ["r--s"]
    assert not is_open(tmp_path / "file")


@pytest.mark.parametrize("look", [lambda mapped: mapped.view, lambda mapped: mapped.tensor(0, 9).view(3, 3)[1:]])
def test_it_stays_as_long_as_somebody_looks(look, path):
    mapped = MappedFile(path)
    seen = look(mapped)
    del mapped
    gc.collect()
    assert mappings(path)
    assert seen[0] is not None
    del seen
    gc.collect()
    assert not mappings(path)


def test_whoever_writes_to_it_ends_and_the_file_is_as_it_was(path):
    program = "import sys; from converters.formats.mapped_file import MappedFile\n"
    program += "MappedFile(sys.argv[1]).tensor(0, 8).zero_()"
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -signal.SIGSEGV
    assert path.read_bytes() == CONTENT
