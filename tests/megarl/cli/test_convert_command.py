"""`megarl convert` and `megarl export`: what they print, what they refuse."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import files_in, write_model

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.number_formats import FP8_BLOCK
from megarl.cli.main import main
from megarl.models.policy import check_not_in_fp8

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def last_line(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


def test_a_model_goes_to_megatron_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["convert", "--hf", str(model), "--out", str(out), "--tp", "2", "--pp", "2", "--ep", "2"]) == 0
    said = capsys.readouterr()
    chunks = list((out / "release").glob("*.distcp"))
    assert said.out.startswith(f"{out}: ")
    assert f"in {len(chunks)} files" in said.out
    flags = out / "megatron_lm_flags.txt"
    assert said.out.splitlines()[1:] == [f"with Megatron-LM: pretrain_gpt.py $(cat {flags}) --load {out} ..."]
    assert f"--tokenizer-model {out}/huggingface" in flags.read_text()
    assert main(["export", "--megatron", str(out), "--out", str(back)]) == 0
    assert capsys.readouterr().out.startswith(f"{back}: ")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (back / name).read_bytes() == (model / name).read_bytes()


def test_a_folder_with_a_space_stays_one_word(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "the model"
    assert main(["convert", "--hf", str(model), "--out", str(out)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith(f"$(cat '{out}/megatron_lm_flags.txt') --load '{out}' ...")


def test_megatron_lms_names_of_the_sizes_are_taken_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--tp", "2", "--pp", "1", "--ep", "2", "--etp", "1"]
    long = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1"]
    long += ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
    said = []
    for words in (short, [*long, "--padded-vocab-size", "256"]):
        assert main(["convert", "--hf", str(model), "--out", str(tmp_path / "out"), *words, "--dry-run", "--json"]) == 0
        facts = last_line(capsys.readouterr().out)
        said.append({name: value for name, value in facts.items() if name != "seconds"})
    assert said[0] == said[1]
    words = ["--tp", "2", "--padded-vocab-size", "51"]
    assert main(["convert", "--hf", str(model), "--out", str(tmp_path / "out"), *words, "--dry-run"]) == 2
    assert "--padded-vocab-size 51" in capsys.readouterr().err


def test_a_model_that_megatron_lm_does_not_know_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.5}))
    assert main(["convert", "--hf", str(model), "--out", str(tmp_path / "out")]) == 0
    assert "flags cannot say all of this model" in capsys.readouterr().out
    assert not (tmp_path / "out/megatron_lm_flags.txt").exists()


def test_an_export_says_that_multi_token_prediction_is_not_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "megatron"
    source = write_model(tmp_path / "deepseek", **DEEPSEEK)
    assert main(["convert", "--hf", str(source), "--out", str(out)]) == 0
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    words = ["--hf-config", str(source), "--out", str(tmp_path / "back")]
    assert main(["export", "--megatron", str(out), *words]) == 0
    assert "without multi-token prediction: the checkpoint does not have the 1 layer that" in capsys.readouterr().out


def test_an_export_leaves_multi_token_prediction_out_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "deepseek", **{**DEEPSEEK, "num_nextn_predict_layers": 1})
    assert main(["convert", "--hf", str(source), "--out", str(tmp_path / "megatron")]) == 0
    words = ["--megatron", str(tmp_path / "megatron"), "--out", str(tmp_path / "back")]
    assert main(["export", *words, "--prediction-layers", "0"]) == 0
    assert "1 layer left out, and the config.json written says" in capsys.readouterr().out
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_model_that_was_released_in_fp8_becomes_a_policy(tmp_path: Path) -> None:
    source = write_model(tmp_path / "deepseek", **{**DEEPSEEK, "num_nextn_predict_layers": 1})
    released, policy = tmp_path / "released", tmp_path / "policy"
    assert main(["convert", "--hf", str(source), "--out", str(tmp_path / "megatron")]) == 0
    assert main(["export", "--megatron", str(tmp_path / "megatron"), "--fp8", "--out", str(released)]) == 0
    with pytest.raises(UserError, match="is in FP8"):
        check_not_in_fp8(released)
    assert main(["convert", "--hf", str(released), "--out", str(tmp_path / "of_released")]) == 0
    words = ["--megatron", str(tmp_path / "of_released"), "--out", str(policy)]
    assert main(["export", *words, "--prediction-layers", "0"]) == 0
    check_not_in_fp8(policy)
    before, after = HuggingFaceCheckpoint(released), HuggingFaceCheckpoint(policy)
    assert json.loads((policy / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert {name for name in before.shapes if not name.endswith("_scale_inv")} > set(after.shapes)
    for name, shape in after.shapes.items():
        whole = Box.whole(shape)
        value = before.read(name, whole)
        if (scales := f"{name}_scale_inv") in before.shapes:
            value = FP8_BLOCK.dequantise(
                value, before.read(scales, Box.whole(before.shapes[scales])), after.dtypes[name]
            )
        assert torch.equal(after.read(name, whole), value), name


def test_json_is_the_last_line_and_the_only_output(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["convert", "--hf", str(model), "--out", str(out), "--tp", "2", "--json"]) == 0
    said = capsys.readouterr()
    facts = last_line(said.out)
    sizes = [path.stat().st_size for path in (out / "release").glob("*.distcp")]
    assert (facts["command"], facts["out"]) == ("convert", str(out))
    assert (facts["bytes"], facts["files"], facts["largest_file_bytes"]) == (sum(sizes), len(sizes), max(sizes))
    assert facts["padded_vocabulary"] == 256
    assert 0 < facts["seconds"] < 60
    assert main(["export", "--megatron", str(out), "--out", str(back), "--json", "--shard-size", "10kB"]) == 0
    exported = last_line(capsys.readouterr().out)
    files = list(back.glob("*.safetensors"))
    assert exported["files"] == len(files) > 1
    assert exported["bytes"] == sum(path.stat().st_size for path in files)
    assert exported["tensors"] == 2 + 1 + 2 * (2 + 6 + 1 + 4 * 3)
    assert said.err == ""


def test_a_dry_run_needs_config_json_only_and_plans_what_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tp", "2", "--pp", "2", "--etp", "1", "--ep", "4", "--make-vocab-size-divisible-by", "16", "--json"]
    words = ["convert", "--hf", str(model), "--out", str(tmp_path / "out"), *sizes]
    assert main(words) == 0
    real = last_line(capsys.readouterr().out)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    assert main(["convert", "--hf", str(bare), "--out", str(bare / "out"), *sizes, "--dry-run"]) == 0
    planned = last_line(capsys.readouterr().out)
    assert (planned.pop("ranks"), planned.pop("dry_run")) == (8, True)
    for facts in (real, planned):
        del facts["seconds"], facts["out"]
    assert planned == real
    assert [path.name for path in bare.iterdir()] == ["config.json"]
    assert main(["convert", "--hf", str(bare), "--out", "out", "--dry-run", "--dtype", "fp32"]) == 0
    assert "nothing is written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "0"], "--tp is 0"),
        (["--etp", "-2"], "--etp is -2"),
        (["--ep", "3"], "4 experts cannot be divided by --ep = 3"),
        (["--pp", "3"], "change --pp (the nearest that all layers can be shared out to is 2) or set --decoder-first-"),
        (["--pp", "2", "--decoder-first-pipeline-num-layers", "2"], "takes 2 of the 2 layers"),
        (["--workers", "0"], "--workers 0 leaves nobody to do the work"),
        (["--hf", "nowhere"], "nowhere is not a folder"),
        (["--out", "model"], "the output model is model, which is read: choose a folder"),
        (["--out", "model/config.json/out"], "config.json"),
        (["--hf", "model/config.json"], "is not a folder"),
    ],
)
def test_bad_input_to_convert_is_one_sentence(
    words: list[str],
    says: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model.parent)
    before = files_in(model.parent)
    assert main(["convert", "--hf", "model", "--out", "out", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert files_in(model.parent) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shard-size", "many"], "--shard-size many is no size; write it as 5GB, 500MB or 2GiB"),
        (["--shard-size", "0.1B"], "--shard-size 0.1B is no size"),
        (
            ["--megatron", "model"],
            "model is a HuggingFace folder already: megarl export makes one of a torch_dist checkpoint",
        ),
    ],
)
def test_bad_input_to_export_is_one_sentence(
    words: list[str], says: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["export", "--megatron", "nowhere", "--out", "out", *words]) == 2
    assert says in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_file_that_cannot_be_read_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A loop of links cannot be opened, not even by root.
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")
    assert main(["convert", "--hf", str(model), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{model / 'config.json'} cannot be read" in said


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`mount(options)`: a file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def do(options: str) -> Path:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
        ).returncode:
            pytest.skip("mounting a file system needs more rights")
        return folder

    yield do
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_a_disk_without_room_is_said_and_left_alone(
    model: Path, mount: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mount("size=64k")
    assert main(["convert", "--hf", str(model), "--out", str(disk / "out")]) == 2
    assert re.search(rf"{disk} has (no room|room for)", capsys.readouterr().err)
    assert list(disk.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_said(
    model: Path, mount: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mount("ro")
    assert main(["convert", "--hf", str(model), "--out", str(disk / "out")]) == 2
    assert "(Read-only file system)" in capsys.readouterr().err


def test_every_command_has_the_same_facts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    for words in (
        ["convert", "--hf", str(model), "--out", megatron],
        ["export", "--megatron", megatron, "--out", back],
        ["inspect", back],
        ["diff", back, megatron],
        ["verify", back],
    ):
        assert main([*words, "--json"]) == 0
        facts = last_line(capsys.readouterr().out)
        assert facts["command"] == words[0]
        assert facts.keys() >= {"seconds", "bytes", "tensors", "files", "out"}
