"""The fault of a distributed checkpoint or of its manifest is one clear sentence, with nothing left."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from changed_folders import Change, write
from conversions import MODELS, export
from distributed import cut, huggingface_tensors, whole, whole_tensors, write_distributed
from refusal import assert_refused

from converters.manifest import MANIFEST
from converters.manifest.content import sealed


@pytest.fixture
def megatron(megatron_original, tmp_path):
    shutil.copytree(megatron_original, tmp_path / "megatron")
    return tmp_path / "megatron"


def cut_distcp(length: int) -> Change:
    def change(folder: Path) -> None:
        path = folder / "release/__1_0.distcp"
        path.write_bytes(path.read_bytes()[:length])

    return change


def manifest_says(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / MANIFEST
        content = json.loads(path.read_text())
        del content["crc32"]
        path.write_bytes(sealed({**content, **fields}))

    return change


def zeros_in_distcp(folder: Path) -> None:
    path = folder / "release/__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def flipped_element(folder: Path) -> None:
    path = folder / "release/__1_0.distcp"
    content = bytearray(path.read_bytes())
    ((_, offset, nbytes, _),) = next(
        places
        for places in json.loads((folder / "megarl_manifest.json").read_text())["tensors"].values()
        if places[0][0] == "release/__1_0.distcp"
    )
    content[offset + nbytes // 2] ^= 1
    path.write_bytes(content)


TRACKER, OWN_CONFIG = "latest_checkpointed_iteration.txt", "huggingface/config.json"
MEGATRON_CHANGES: dict[str, tuple[Change, str]] = {
    "no tracker": (lambda folder: (folder / TRACKER).unlink(), "has neither .metadata nor latest_checkpointed"),
    "empty tracker": (write(TRACKER, ""), "says '', which is neither a number nor 'release'"),
    "tracker of words": (write(TRACKER, "../x"), "says '../x', which is neither"),
    "tracker of another iteration": (write(TRACKER, "12"), "names iter_0000012, which has no .metadata"),
    "tracker of many digits": (write(TRACKER, "1" * 5000), "which is neither a number"),
    "tracker in bytes": (lambda folder: (folder / TRACKER).write_bytes(b"\xff\xfe") and None, "neither a number"),
    "no table": (lambda folder: (folder / "release/.metadata").unlink(), "names release, which has no .metadata"),
    "missing file": (
        lambda folder: (folder / "release/__1_0.distcp").unlink(),
        "names __1_0.distcp, which is missing; copy it again",
    ),
    "empty file": (cut_distcp(0), "__1_0.distcp is truncated: it has 0 bytes of"),
    "truncated file": (cut_distcp(-1), "__1_0.distcp is truncated: it has"),
    "flipped bit of an element": (flipped_element, r"__1_0.distcp is damaged: the chunk of .* has another checksum"),
    "file of zeros": (zeros_in_distcp, r"__1_0.distcp \(chunk of .*\) is damaged"),
    "no config": (lambda folder: (folder / OWN_CONFIG).unlink(), "has no huggingface/config.json; name a folder with"),
    "broken config": (write(OWN_CONFIG, "{"), "config.json is not JSON"),
    "config of another family": (
        lambda folder: (folder / OWN_CONFIG).write_text(json.dumps(MODELS["llama"])) and None,
        r"linear_qkv.weight with shape \[4, 32, 8\], where config.json gives \[4, 16, 8\]; the two do not belong",
    ),
    "config with fewer layers": (
        lambda folder: (folder / OWN_CONFIG).write_text(json.dumps({**MODELS["qwen3_tied"], "num_hidden_layers": 3})),
        r"with shape \[4, .*\], where config.json gives \[3, ",
    ),
    "config with a larger vocabulary": (
        lambda folder: (folder / OWN_CONFIG).write_text(json.dumps({**MODELS["qwen3_tied"], "vocab_size": 19})),
        r"embedding.word_embeddings.weight with shape \[18, 8\], where config.json gives \[19, 8\]",
    ),
    "config with experts": (
        lambda folder: (folder / OWN_CONFIG).write_text(json.dumps(MODELS["qwen3_moe"])) and None,
        "lacks .*which the model of config.json has; the two do not belong together, or the checkpoint is incomplete",
    ),
    "config that is not tied": (
        lambda folder: (folder / OWN_CONFIG).write_text(json.dumps(MODELS["qwen3"])) and None,
        "lacks output_layer.weight",
    ),
}
MANIFEST_CHANGES: dict[str, tuple[Change, str]] = {
    "broken manifest": (write("megarl_manifest.json", "{"), "megarl_manifest.json is damaged"),
    "manifest of something else": (write("megarl_manifest.json", "[]"), "megarl_manifest.json is damaged"),
    "manifest without a source": (manifest_says(source=None), "megarl_manifest.json is no manifest"),
    "manifest with a place of few numbers": (
        manifest_says(files={"a": ["b", 1]}),
        "megarl_manifest.json is no manifest",
    ),
    "manifest with places in words": (
        manifest_says(tensors={"a": [["b", "0", 1, 2]]}),
        "megarl_manifest.json is no manifest",
    ),
    "manifest of an unknown copy": (manifest_says(source={"copies": ["ln_head.weight"]}), "ln_head.weight"),
    "manifest of no list of copies": (manifest_says(source={"copies": 7}), "names copies of weights, 7 for one"),
}


@pytest.mark.parametrize("name", MANIFEST_CHANGES)
def test_what_is_wrong_with_a_manifest_is_said(name, megatron, tmp_path):
    change, message = MANIFEST_CHANGES[name]
    change(megatron)
    (tmp_path / "there").mkdir()
    assert_refused(export, megatron, tmp_path / "there/out", message, workers=2)


@pytest.mark.parametrize("file", ["huggingface/tokenizer.json", OWN_CONFIG, TRACKER, "release/common.pt"])
def test_small_files_that_are_not_those_of_the_manifest_are_refused(file, megatron, tmp_path):
    path = megatron / file
    path.write_bytes(path.read_bytes() + b" ")
    (tmp_path / "there").mkdir()
    assert_refused(export, megatron, tmp_path / "there/out", f"{file} is not the file that .*{MANIFEST} has the")
    path.unlink()
    assert_refused(export, megatron, tmp_path / "there/out", f"{file} is missing, which is in")


def test_side_files_of_ones_own_take_the_place_of_damaged_ones(megatron, tmp_path):
    shutil.copytree(megatron / "huggingface", tmp_path / "mine")
    (megatron / "huggingface/tokenizer.json").write_text("{")
    export(megatron, tmp_path / "out", hf_config_folder=tmp_path / "mine")
    assert (tmp_path / "out/tokenizer.json").read_text() == (tmp_path / "mine/tokenizer.json").read_text()


@pytest.mark.parametrize("name", MEGATRON_CHANGES)
def test_what_is_wrong_with_a_distributed_checkpoint_is_said(name, megatron, tmp_path):
    """Even where there is no manifest to compare it with."""
    change, message = MEGATRON_CHANGES[name]
    change(megatron)
    (megatron / MANIFEST).unlink()
    (tmp_path / "there").mkdir()
    assert_refused(export, megatron, tmp_path / "there/out", message, workers=2)


def test_duplicate_chunks_of_the_same_values_are_refused_too(tmp_path):
    """Which of them is right nobody can say."""
    config = MODELS["qwen3"]
    tensors = whole_tensors(config, huggingface_tensors(config), stacked=True)
    boxes = whole(tensors)
    (box,) = boxes["decoder.final_layernorm.weight"]
    half = type(box)((3,), (8,))
    boxes["decoder.final_layernorm.weight"] = [box, half]
    write_distributed(tmp_path / "megatron", tensors, cut(tensors, boxes), config=config)
    message = "holds .* of model.norm.weight in two chunks; .metadata is damaged"
    assert_refused(export, tmp_path / "megatron", tmp_path / "there/out", message)
