"""Conversions in processes of their own that are killed, interrupted or started twice."""

import shutil
import signal
from pathlib import Path

import pytest
from checkpoints import files_in, start, wait_for_lines, write_model

from megarl.cli.main import main

# 24 MB in 300 tensors: a run has a middle.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 192, "num_experts": 16, "num_hidden_layers": 5}
SIZES = ("--tp", "2", "--ep", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "model", **WIDE)


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "out"
    assert main(["convert", "--hf", str(model), "--out", str(folder), *SIZES, "--json", "--workers", "1"]) == 0
    return folder


def test_a_killed_conversion_goes_on_to_the_same_bytes(model: Path, converted: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    words = ("convert", "--hf", str(model), "--out", str(out), *SIZES, "--json", "--workers", "2")
    process = start(*words, lines=30)
    wait_for_lines(process, partial / ".journal", 30)
    process.kill()
    process.communicate()
    assert not out.exists()
    half = files_in(partial)
    assert half.keys() < {*files_in(converted), ".journal", ".lock"}
    assert main(list(words)) == 0
    continued = files_in(out)
    # To the same place, which common.pt names.
    shutil.rmtree(out)
    assert main(list(words)) == 0
    assert files_in(out) == continued
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_says_how_to_go_on(converted: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ("export", "--megatron", str(converted), "--shard-size", "5MB", "--workers", "1")
    assert main([*words, "--out", str(whole), "--json"]) == 0
    process = start(*words, "--out", out, lines=30)
    wait_for_lines(process, tmp_path / "out.partial" / ".journal", 30)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "megarl: interrupted; the same command goes on where it was"
    assert "Traceback" not in errors
    assert not out.exists()
    assert main([*words, "--out", str(out), "--json"]) == 0
    assert files_in(out) == files_in(whole)


def test_a_second_run_is_told_of_the_first(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ("convert", "--hf", str(model), "--out", str(out), "--json")
    process = start(*words, lines=2)
    wait_for_lines(process, tmp_path / "out.partial" / ".journal", 2)
    assert main(list(words)) == 2
    assert "another process is writing" in capsys.readouterr().err
    process.communicate()
    assert process.returncode == 0
    assert main(["diff", str(model), str(out), "--json"]) == 0
