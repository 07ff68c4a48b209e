"""A HuggingFace folder's fault, sizes that do not fit it and paths in the way are each one clear sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import INDEX, O_PROJ, Change, write
from conversions import BF16, MODELS, content_of, convert, everything_in, export, random_tensors, write_model
from refusal import assert_refused
from safetensors.torch import load_file, save_file

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes, check_divisible


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
    **{
        f"weights in {dtype}": (
            rewrite(O_PROJ, torch.zeros(8, 16, dtype=dtype)),
            f"hf holds {O_PROJ} in {dtype}; .* bf16",
        )
        for dtype in (torch.int8, torch.uint8, torch.bool)
    },
    "codes of another shape": (
        rewrite(O_PROJ, torch.zeros(64, 1, dtype=torch.uint8)),
        f"hf holds {O_PROJ} in torch.uint8; weights are read in floating types only",
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
    ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4}, "takes 4 of the 4 layers"),
]


def test_a_dense_model_has_no_experts_to_divide():
    dense = read_architecture(MODELS["qwen3_tied"])
    with pytest.raises(UserError, match="has no experts for expert_model_parallel_size = 4 to divide; leave it at 1"):
        check_divisible(dense, ParallelSizes(world_size=4, expert_model_parallel_size=4))


@pytest.mark.parametrize(("sizes", "message"), WRONG_SIZES)
def test_sizes_that_do_not_divide_are_refused(sizes, message, original, tmp_path):
    parallel = ParallelSizes(world_size=24, **sizes)
    assert_refused(convert, original, tmp_path / "there/out", message, sizes=parallel)


def test_folders_that_are_not_there_or_hold_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("words")
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        assert_refused(convert, folder, tmp_path / "there/out", "is not a folder; give the path of a model")
        assert_refused(export, folder, tmp_path / "there/out", "is not a folder; give the path of a torch_dist")
    assert_refused(convert, tmp_path / "empty", tmp_path / "there/out", "holds neither model.safetensors nor")
    assert_refused(export, tmp_path / "empty", tmp_path / "there/out", "has neither .metadata nor")


def test_a_checkpoint_of_megatron_is_not_converted_again(megatron_original, tmp_path):
    assert_refused(
        convert, megatron_original, tmp_path / "out", "is a torch_dist checkpoint of Megatron already: .*export"
    )


@pytest.mark.parametrize("work", [convert, export])
def test_an_output_in_its_own_source_is_refused(work, original, megatron_original, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(original if work is convert else megatron_original, source)
    for out in (source, source / "out", source / "deep/out"):
        assert_refused(work, source, out, "source, which is read: choose a folder outside of it")


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
