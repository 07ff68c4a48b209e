"""Whatever happens to a file of a checkpoint: no command is silently wrong, ends in a traceback or leaves anything."""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import files_in, write_model
from damage import DAMAGES, cases

from converters.errors import UserError
from converters.manifest import MANIFEST, read_manifest
from megarl.cli.main import main

Run = Callable[..., tuple[int, str]]
FLIPS = 200


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)` gives the exit code and what was said to standard error, at most one line."""

    def command(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr().err
        assert said.count("\n") <= 1, said
        return code, said

    return command


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its conversion and its export."""
    folder = tmp_path_factory.mktemp("written")
    model = write_model(folder / "hf", num_hidden_layers=1)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["convert", "--hf", str(model), "--tp", "2", "--out", str(folder / "megatron"), "--json"]) == 0
    assert main(["export", "--megatron", str(folder / "megatron"), "--out", str(folder / "export"), "--json"]) == 0
    return folder


def test_a_damaged_conversion_is_found_and_never_exported(written: Path, tmp_path: Path, run: Run) -> None:
    good, expected = files_in(written / "megatron"), files_in(written / "export")
    folder, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(written / "megatron", folder)
    for file, kind in cases(written / "megatron"):
        DAMAGES[kind](folder / file)
        where = (file, kind)
        # Without its manifest the checkpoint is as one of another program's, and is whole.
        is_known = where != (MANIFEST, "deleted")
        assert (run("verify", folder)[0] != 0) is is_known, where
        assert run("inspect", folder, "--json")[0] in (0, 2), where
        code, said = run("export", "--megatron", folder, "--out", out, "--json")
        # Rows of zeros that pad the vocabulary are not read.
        assert code == 2 or (code == 0 and files_in(out) == expected), (where, said)
        assert code == 2 or file.endswith(".distcp") or not is_known, where
        shutil.rmtree(out, ignore_errors=True)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name], where
        (folder / file).write_bytes(good[file])


def test_a_damaged_export_is_found(written: Path, tmp_path: Path, run: Run) -> None:
    good, folder = files_in(written / "export"), tmp_path / "damaged"
    shutil.copytree(written / "export", folder)
    for file, kind in cases(written / "export"):
        DAMAGES[kind](folder / file)
        assert run("verify", folder)[0] in (1, 2), (file, kind)
        assert run("inspect", folder, "--json")[0] in (0, 2), (file, kind)
        (folder / file).write_bytes(good[file])


def test_every_flipped_bit_of_a_manifest_is_found(written: Path, tmp_path: Path, run: Run) -> None:
    content = (written / "megatron" / MANIFEST).read_bytes()
    draw = random.Random(1)
    places = [(draw.randrange(len(content)), 1 << draw.randrange(8)) for _ in range(FLIPS)]
    # Its beginning, with the checksum, whole.
    places += [(byte, 1 << bit) for byte in range(len(b'{"crc32":"01234567",')) for bit in range(8)]
    unnoticed = []
    for place, bit in places:
        damaged = bytearray(content)
        damaged[place] ^= bit
        (tmp_path / MANIFEST).write_bytes(damaged)
        with suppress(UserError):
            read_manifest(tmp_path)
            unnoticed.append((place, bit))
    assert unnoticed == []
    assert run("verify", tmp_path)[0] == 2
