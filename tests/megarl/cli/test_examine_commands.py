"""`megarl inspect`, `diff` and `verify`: their exit codes and what they print."""

import errno
import json
import re
from pathlib import Path

import pytest
from checkpoints import flip_bit, write_model
from safetensors.torch import load_file, save_file

from megarl.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def converted(model: Path, capsys: Captured) -> Path:
    folder = model.with_name("megatron")
    assert main(["convert", "--hf", str(model), "--out", str(folder), "--tp", "2", "--json"]) == 0
    capsys.readouterr()
    return folder


def test_inspect_says_what_it_is(model: Path, converted: Path, capsys: Captured) -> None:
    assert main(["inspect", str(model)]) == 0
    table = capsys.readouterr().out
    assert "qwen3_moe: 2 layers, 4 experts" in table
    assert "complete    yes" in table
    assert main(["inspect", str(converted), "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert (facts["command"], facts["complete"], facts["layout"]["parallel"]["TP"]) == ("inspect", True, 2)
    assert facts["dtypes"] == {"bfloat16": {"tensors": facts["tensors"], "bytes": facts["bytes"]}}
    assert said.err == ""


def test_inspect_says_what_is_missing(model: Path, capsys: Captured) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    assert main(["inspect", str(model)]) == 0
    assert "no: " in (said := capsys.readouterr().out)
    assert "lacks the tensor model.norm.weight" in said


def test_diff_ends_with_0_for_the_same_and_1_for_another(model: Path, converted: Path, capsys: Captured) -> None:
    assert main(["diff", str(model), str(converted)]) == 0
    assert "are the same model" in capsys.readouterr().out
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.input_layernorm.weight"][layer + 3] += 1
    save_file(tensors, model / "model.safetensors")
    assert main(["diff", str(model), str(converted), "--limit", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "other values: model.layers.0.input_layernorm.weight: 1 of 16 elements, first at [3], by"
    )
    assert lines[1] == "other values: ... and 1 more"
    assert "DIFFER" in lines[2]
    assert main(["diff", str(model), str(converted), "--json", "--limit", "1"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["same"], facts["different"], len(facts["values"])) == (False, 2, 1)
    assert facts["values"][0]["first"] == [3]


def test_diff_says_so_where_only_the_types_differ(model: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "wide"
    assert main(["convert", "--hf", str(model), "--out", str(out), "--dtype", "fp32", "--json"]) == 0
    capsys.readouterr()
    assert main(["diff", str(model), str(out)]) == 0
    said = capsys.readouterr().out
    assert "other types: 45 tensors are in bfloat16 in A and in float32 in B" in said
    assert "are the same model, in other types" in said


def test_diff_says_that_models_without_a_configuration_have_the_same_weights(
    model: Path, converted: Path, capsys: Captured
) -> None:
    (model / "config.json").unlink()
    assert main(["diff", str(model), str(converted)]) == 0
    said = capsys.readouterr().out
    assert f"{model} and {converted} have the same weights: 45 tensors compared" in said
    assert said.endswith("; config.json not, since one has none or it is of an unknown model\n")
    assert main(["diff", str(model), str(converted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config_compared"] is False


def test_verify_ends_with_0_1_or_2(model: Path, converted: Path, capsys: Captured) -> None:
    assert main(["verify", str(converted)]) == 0
    assert f"{converted} is intact by its manifest" in capsys.readouterr().out
    flip_bit(converted / "release/__1_0.distcp", -1)
    (converted / "huggingface/tokenizer.json").unlink()
    assert main(["verify", str(converted)]) == 1
    said = capsys.readouterr().out
    assert "damaged: release/__1_0.distcp" in said
    assert "missing: huggingface/tokenizer.json" in said
    assert "DAMAGED" in said
    assert main(["verify", str(converted), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["intact"], len(facts["damaged"]), facts["missing"]) == (False, 1, ["huggingface/tokenizer.json"])
    assert main(["verify", str(model)]) == 2
    assert "has no checksums" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "nowhere"], "nowhere is not a folder"),
        (["verify", "."], ". holds no checkpoint"),
        (["diff", "nowhere", "model"], "nowhere is not a folder"),
        (["diff", "model", "model", "--limit", "-1"], "--limit -1"),
        (["diff", "model", "model", "--workers", "0"], "--workers 0"),
        (["inspect", "model", "--hf-config", "nowhere"], "nowhere/config.json is missing"),
        (
            ["inspect", "model", "--hf-config", "model/config.json"],
            "model/config.json is a file; give the folder that has",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], says: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(words) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            r"a file of the checkpoint cannot be read .*\(Too many open files",
        ),
        (OSError(errno.EIO, "Input/output error", "one/file"), r"one/file cannot be read or written \(Input/output"),
        (OSError("nothing known"), r"a file of the checkpoint cannot be read or written \(nothing known\)"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "diff", "verify"])
def test_files_that_cannot_be_read_are_no_finding(
    command: str, error: OSError, sentence: str, model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"converters.examine.{'compare' if command == 'diff' else command}", fails)
    assert main([command, str(model), *([str(model)] if command == "diff" else [])]) == 2
    said = capsys.readouterr().err
    assert re.match(f"megarl: {sentence}", said)
    assert len(said.splitlines()) == 1
