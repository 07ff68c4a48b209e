"""A checkpoint's fault is one clear sentence, before or without anything of the output being left."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import (
    BF16,
    FP8,
    FP32,
    MODELS,
    content_of,
    contents,
    convert,
    everything_in,
    export,
    make,
    random_numbers,
    random_tensors,
    write_model,
)
from distributed import cut, huggingface_tensors, whole, whole_tensors, write_distributed
from hypothesis import given, settings
from refusal import assert_refused
from safetensors.torch import load_file, save_file
from test_torch_dist_metadata import damages

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from converters.manifest import MANIFEST
from converters.manifest.content import sealed

INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model in three files."""
    tensors = random_tensors(MODELS["qwen3_moe"])
    return write_model(tmp_path_factory.mktemp("original") / "hf", MODELS["qwen3_moe"], tensors, files=3)


@pytest.fixture
def hf(original, tmp_path):
    shutil.copytree(original, tmp_path / "hf")
    return tmp_path / "hf"


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rewrite(name: str, new: torch.Tensor | None, *, indexed: bool = True) -> Change:
    """Change a tensor, add it, or with None leave it out."""

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        path = folder / index["weight_map"].get(name, "model-0.safetensors")
        tensors = {**load_file(path), name: new}
        save_file({key: each for key, each in tensors.items() if each is not None}, path)
        index["weight_map"] |= {name: path.name}
        if new is None and indexed:
            del index["weight_map"][name]
        if indexed:
            (folder / INDEX).write_text(json.dumps(index))

    return change


def index_says(name: str, file: Any) -> Change:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def write(file: str, content: str) -> Change:
    return lambda folder: (folder / file).write_text(content) and None


def cut_to(length: int) -> Change:
    def change(folder: Path) -> None:
        path = file_of(folder, O_PROJ)
        path.write_bytes(path.read_bytes()[:length])

    return change


def config_says(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def a_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


NEXT = torch.zeros(2, dtype=BF16)
CHANGES: dict[str, tuple[Change, str]] = {
    "missing tensor": (rewrite(O_PROJ, None), rf"hf lacks the tensor {O_PROJ}, which its model has"),
    "missing, but in the index": (rewrite(O_PROJ, None, indexed=False), f"says that {O_PROJ} is in .*does not hold it"),
    "surplus tensor": (rewrite("model.extra", NEXT), "holds the tensor model.extra, which a model of this config"),
    "not in the index": (rewrite("model.extra", NEXT, indexed=False), "holds model.extra, which .*index.json does not"),
    "a layer too many": (
        rewrite("model.layers.4.self_attn.o_proj.weight", NEXT),
        "holds the tensor model.layers.4.self_attn.o_proj.weight, which a model of this",
    ),
    "misshapen tensor": (
        rewrite(O_PROJ, torch.zeros(16, 8, dtype=BF16)),
        rf"holds {O_PROJ} with shape \[16, 8\], where config.json gives \[8, 16\]; the two do not belong together",
    ),
    "in two files": (
        lambda folder: save_file(
            {**load_file(folder / "model-0.safetensors"), **load_file(folder / "model-1.safetensors")},
            folder / "model-0.safetensors",
        ),
        "is in both .*model-0.safetensors and .*model-1.safetensors; delete one of them",
    ),
    "missing file": (
        lambda folder: (folder / "model-1.safetensors").unlink(),
        "names model-1.safetensors, which is",
    ),
    "index names a missing file": (index_says(O_PROJ, "gone.safetensors"), "names gone.safetensors, which is missing"),
    "index leads out": (index_says(O_PROJ, "../hf/model-0.safetensors"), "which leads out of the folder"),
    "index leads out by an absolute path": (index_says(O_PROJ, "/etc/passwd"), "names /etc/passwd, which leads out"),
    "index names a folder": (index_says(O_PROJ, "."), "which is missing"),
    "index names something too long": (index_says(O_PROJ, "x" * 5000), "which is missing"),
    "index with a number": (index_says(O_PROJ, 7), "has no weight_map"),
    "index of nothing": (write(INDEX, '{"weight_map": {}}'), "holds no|lacks the tensor"),
    "broken index": (write(INDEX, "{"), "index.json is not JSON"),
    "deep index": (write(INDEX, "[" * 100_000), "index.json is not JSON"),
    "a folder as index": (a_folder(INDEX), "index.json"),
    "empty file": (cut_to(0), "is truncated"),
    "truncated header": (cut_to(100), "is truncated"),
    "truncated": (cut_to(-1), "is truncated"),
    "a folder as file": (a_folder("model-1.safetensors"), "model-1.safetensors, which is missing"),
    "missing config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "empty config": (write("config.json", ""), "config.json is not JSON"),
    "broken config": (write("config.json", '{"model_type": "qwen'), "config.json is not JSON"),
    "config of something else": (write("config.json", "[]"), "config.json is not a JSON object"),
    "a folder as config": (a_folder("config.json"), "config.json"),
    "unknown model": (config_says(model_type="gpt9"), "'gpt9', which is not supported"),
    "model type of a number": (config_says(model_type=7), "model_type = 7, where a name belongs"),
    "model type of a list": (config_says(model_type=[7]), r"model_type = \[7\], where a name belongs"),
    "other model": (config_says(num_hidden_layers=3), "the tensor model.layers.3.* and .* more, which a model of this"),
    "number in words": (config_says(num_hidden_layers="four"), "num_hidden_layers = 'four'"),
    "number with a fraction": (config_says(num_hidden_layers=4.5), "num_hidden_layers = 4.5"),
    "number of heads is zero": (config_says(num_attention_heads=0), "num_attention_heads = 0"),
    "number of key-value heads is zero": (config_says(num_key_value_heads=0), "num_key_value_heads = 0"),
    "negative width": (config_says(hidden_size=-8), "hidden_size = -8"),
    "no number": (config_says(vocab_size=[18]), r"vocab_size = \[18\]"),
    "experts in words": (config_says(num_local_experts="4"), "num_local_experts = '4'"),
    "flag in words": (config_says(tie_word_embeddings="false"), "tie_word_embeddings = 'false', where true or"),
    "rotary embedding in words": (config_says(rope_parameters="default"), "rope_parameters = 'default', where an o"),
    "a layer for layers": (config_says(mlp_only_layers=0), "mlp_only_layers = 0, where a list belongs"),
    "true": (config_says(moe_intermediate_size=True), "moe_intermediate_size = True"),
    "other quantisation": (config_says(quantization_config={"quant_method": "awq"}), "quant_method = 'awq'"),
    "no quantisation": (config_says(quantization_config="fp8"), "quantization_config"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_wrong_with_a_huggingface_folder_is_said(name, hf, tmp_path):
    change, message = CHANGES[name]
    change(hf)
    (tmp_path / "there").mkdir()
    assert_refused(convert, hf, tmp_path / "there/out", message)


def test_a_copy_with_other_values_is_refused(tmp_path):
    tensors = random_tensors(MODELS["qwen3_tied"], copies=("lm_head.weight",))
    tensors["lm_head.weight"][17, 7] += 1
    write_model(tmp_path / "hf", MODELS["qwen3_tied"], tensors)
    message = "holds lm_head.weight with other values than model.embed_tokens.weight"
    assert_refused(convert, tmp_path / "hf", tmp_path / "there/out", message)


def test_a_copy_that_holds_the_same_nan_is_one(tmp_path):
    tensors = random_tensors(MODELS["qwen3_tied"], copies=("lm_head.weight",))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name][3, 2] = torch.nan
    write_model(tmp_path / "hf", MODELS["qwen3_tied"], tensors)
    convert(tmp_path / "hf", tmp_path / "megatron")
    export(tmp_path / "megatron", tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(tmp_path / "hf")


def test_multi_token_prediction_that_is_not_there_is_named(tmp_path):
    tensors = random_tensors(MODELS["deepseek_v3"])
    left = {name: each for name, each in tensors.items() if not name.startswith("model.layers.4.")}
    write_model(tmp_path / "hf", MODELS["deepseek_v3"], left)
    assert_refused(convert, tmp_path / "hf", tmp_path / "there/out", "set num_nextn_predict_layers to 0 there")


WRONG_SIZES = [
    ({"tensor_model_parallel_size": 3}, "num_attention_heads = 4 cannot be divided by tensor_model_parallel_size = 3"),
    ({"tensor_model_parallel_size": 8}, "num_attention_heads = 4 cannot be divided by tensor_model_parallel_size = 8"),
    ({"pipeline_model_parallel_size": 3}, r"4 of the 4 layers \(num_hidden_layers\) cannot be shared out evenly to 3"),
    ({"pipeline_model_parallel_size": 8}, "layers"),
    ({"expert_model_parallel_size": 3}, "model's 4 experts cannot be divided by expert_model_parallel_size = 3"),
    ({"expert_tensor_parallel_size": 4}, "moe_intermediate_size = 6 cannot be divided by expert_tensor_parallel_size"),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
        "a pipeline stage of 2 layers cannot be cut into 4 chunks",
    ),
    ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4}, "stage of 0 layers|cannot be"),
]


@pytest.mark.parametrize(("sizes", "message"), WRONG_SIZES)
def test_sizes_that_do_not_divide_are_refused(sizes, message, original, tmp_path):
    parallel = ParallelSizes(world_size=24, **sizes)
    assert_refused(convert, original, tmp_path / "there/out", message, sizes=parallel)


def fp8_model() -> dict[str, torch.Tensor]:
    tensors = random_tensors(MODELS["qwen3"], draw=random_numbers)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
        tensors[name] = tensors[name].to(FP8)
    return tensors


SCALES = f"{O_PROJ}_scale_inv"
FP8_CHANGES = {
    "no scales": ({SCALES: None}, f"holds {O_PROJ} in FP8 without its scales {SCALES}"),
    "scales of another shape": ({SCALES: torch.ones(2, 1)}, rf"holds the scales {SCALES} .*shape \[2, 1\], where"),
    "scales of one dimension": ({SCALES: torch.ones(1)}, rf"holds the scales {SCALES} .*shape \[1\], where"),
    "scales of another type": ({SCALES: torch.ones(1, 1).half()}, f"holds the scales {SCALES} in torch.float16"),
    "scales of nothing": ({O_PROJ: torch.zeros(8, 16, dtype=BF16)}, f"holds the scales {SCALES}, but no tensor"),
    "another FP8": ({O_PROJ: torch.zeros(8, 16, dtype=torch.float8_e5m2)}, f"holds {O_PROJ} in torch.float8_e5m2"),
    "a vector": ({"model.norm.weight": torch.zeros(8, dtype=FP8)}, r"holds model.norm.weight in FP8 with shape \[8\]"),
    "codes of another shape": ({O_PROJ: torch.zeros(16, 8, dtype=FP8)}, rf"holds {O_PROJ} with shape \[16, 8\]"),
    "a code that is no number": (
        {O_PROJ: torch.full((8, 16), torch.nan).to(FP8)},
        f"holds {O_PROJ} with the code in row 0, column 0 is NaN",
    ),
    "a scale that is no number": ({SCALES: torch.full((1, 1), torch.nan)}, f"holds {O_PROJ} with the scale .* is nan"),
    "a scale that is infinite": ({SCALES: torch.full((1, 1), torch.inf)}, f"holds {O_PROJ} with the scale .* is inf"),
}


@pytest.mark.parametrize("name", FP8_CHANGES)
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_fp8_that_does_not_fit_together_is_refused(name, dtype, tmp_path):
    changes, message = FP8_CHANGES[name]
    tensors = {key: each for key, each in {**fp8_model(), **changes}.items() if each is not None}
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    assert_refused(convert, tmp_path / "hf", tmp_path / "there/out", message, dtype=dtype, workers=2)


@pytest.fixture(scope="module")
def megatron_original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    make(folder / "hf", "qwen3_tied", draw=random_numbers, copies=("lm_head.weight",))
    convert(folder / "hf", folder / "megatron", ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    return folder / "megatron"


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_weights_that_fp8_cannot_hold_are_named(value, tmp_path):
    tensors = random_tensors(MODELS["qwen3"], dtype=FP32, draw=random_numbers)
    tensors[O_PROJ][3, 5] = value
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    convert(tmp_path / "hf", tmp_path / "megatron")
    message = f"{O_PROJ} cannot be written in FP8: block 0, 0 holds a weight that is NaN, infinite or too large"
    assert_refused(export, tmp_path / "megatron", tmp_path / "there/out", message, fp8=True)
    export(tmp_path / "megatron", tmp_path / "there/out")


def test_folders_that_are_not_there_or_hold_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("words")
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        assert_refused(convert, folder, tmp_path / "there/out", "is not a folder; give the path of a model")
        assert_refused(export, folder, tmp_path / "there/out", "has neither .metadata nor")
    assert_refused(convert, tmp_path / "empty", tmp_path / "there/out", "holds neither model.safetensors nor")
    assert_refused(export, tmp_path / "empty", tmp_path / "there/out", "has neither .metadata nor")


@pytest.mark.parametrize("work", [convert, export])
def test_an_output_that_is_in_the_way_is_let_be(work, original, megatron_original, tmp_path):
    source = original if work is convert else megatron_original
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert_refused(work, source, tmp_path / "out", "out exists; delete it or choose another folder")
    assert_refused(work, source, tmp_path / "file", "file exists; delete it or choose another folder")
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read or written \(Not a directory\)"):
        work(source, tmp_path / "file/out")
    assert everything_in(tmp_path) == before


def test_a_folder_named_like_a_tokenizer_is_no_tokenizer(hf, tmp_path):
    (hf / "tokenizer").mkdir()
    convert(hf, tmp_path / "out")
    assert not (tmp_path / "out/huggingface/tokenizer").exists()


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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = {**MODELS["qwen3"], "num_hidden_layers": 2}
    tensors = random_tensors(config)
    return write_model(tmp_path_factory.mktemp("small") / "hf", config, tensors, files=2), contents(tensors)


def linked(source: Path, target: Path, damaged: str, content: bytes) -> None:
    """A copy of which one file has another content."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    (target / damaged).unlink()
    (target / damaged).write_bytes(content)


@pytest.mark.parametrize("file", ["config.json", INDEX, "model-1.safetensors"])
@settings(max_examples=120)
@given(damage=damages())
def test_any_damage_beside_the_elements_is_refused_or_changes_no_tensor(file, small, tmp_path_factory, damage):
    source, expected = small
    folder = tmp_path_factory.mktemp("damaged")
    content = (source / file).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if file.endswith(".safetensors") else len(content)
    linked(source, folder / "hf", file, damage(content[:end]) + content[end:])
    with suppress(UserError):
        convert(folder / "hf", folder / "there/megatron")
        export(folder / "there/megatron", folder / "there/back")
        assert content_of(folder / "there/back") == expected
        return
    assert [path.name for path in folder.iterdir()] == ["hf"]


@settings(max_examples=60)
@given(damage=damages())
def test_any_damage_of_a_manifest_is_refused_or_changes_no_tensor(megatron_original, tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("damaged")
    content = (megatron_original / "megarl_manifest.json").read_bytes()
    linked(megatron_original, folder / "megatron", "megarl_manifest.json", damage(content))
    with suppress(UserError):
        export(folder / "megatron", folder / "there/hf")
        assert content_of(folder / "there/hf").keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
        return
    assert [path.name for path in folder.iterdir()] == ["megatron"]
