"""Two checkpoints of either kind are the same model, or what tells them apart is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conversions import (
    MODELS,
    architecture_of,
    convert,
    export,
    make,
    no_progress,
    random_numbers,
    random_tensors,
    write_model,
)
from safetensors.torch import load_file, save_file

from converters.boxes import Box
from converters.errors import UserError
from converters.examine import Difference, ValueDifference, compare
from converters.examine.opening import open_checkpoint
from converters.examine.weights import weights_of
from converters.layouts.megatron import ParallelSizes

FAMILY = "deepseek_v3"  # with experts, an expert bias in fp32, multi-token prediction and its copies
SIZES = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def diff(a: Path, b: Path, hf_config_folder: Path | None = None) -> Difference:
    return compare(a, b, hf_config_folder=hf_config_folder, workers=2, progress=no_progress)


def write(folder: Path, **changed: torch.Tensor | None) -> Path:
    """The model with some tensors changed, added or, with None, left out."""
    tensors = {**random_tensors(MODELS[FAMILY], draw=random_numbers), **changed}
    return write_model(folder, MODELS[FAMILY], {name: each for name, each in tensors.items() if each is not None})


@pytest.fixture
def model(tmp_path) -> Path:
    return write(tmp_path / "model")


@pytest.mark.parametrize("name", MODELS)
def test_a_conversion_is_the_same_model_even_where_it_holds_nan(name, tmp_path):
    model = make(tmp_path / "model", name)
    convert(model, tmp_path / "megatron")
    found = diff(model, tmp_path / "megatron")
    assert found.is_same
    tensors = load_file(model / "model.safetensors")
    assert found.compared == len(tensors)
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_two_layouts_are_the_same_model(model, tmp_path):
    convert(model, tmp_path / "one")
    convert(model, tmp_path / "four", SIZES, vocabulary_multiple=16)
    done: list[tuple[int, int]] = []
    folders = tmp_path / "one", tmp_path / "four"
    found = compare(*folders, hf_config_folder=None, workers=2, progress=lambda *both: done.append(both))
    assert found.is_same
    assert done[-1] == (found.nbytes, found.nbytes)
    assert [each[0] for each in done] == sorted(each[0] for each in done)


@pytest.mark.parametrize("other", ["model", "megatron"])
def test_a_changed_element_is_named_with_its_place_and_size(other, model, tmp_path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    changed = load_file(model / "model.safetensors")[name].clone()
    before = changed[1, 2].double().item()
    changed[1, 2] = 4 * before
    convert(model, tmp_path / "megatron", SIZES)
    found = diff(write(tmp_path / "changed", **{name: changed}), tmp_path / other)
    gap = abs(3 * before)
    assert found.values == [ValueDifference(name, 1, changed.numel(), (1, 2), gap, 0.75, 0, False)]
    assert not found.is_same


def test_values_that_are_no_numbers(tmp_path):
    nan, infinity = float("nan"), float("inf")
    cases = {
        "same_nan": ([nan, 1.0], [nan, 1.0]),
        "zeros": ([0.0, 0.0], [-0.0, 0.0]),
        "new_nan": ([1.0, nan, 2.0, infinity, infinity], [nan, 1.0, 2.5, -infinity, infinity]),
    }
    for folder, number in (("a", 0), ("b", 1)):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.tensor(both[number]) for name, both in cases.items()}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.values == [ValueDifference("new_nan", 4, 5, (0,), 0.5, 0.2, 3, False)]


def test_types_alone_do_not_make_another_model(tmp_path):
    numbers = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers[3, 3] = float("nan")
    versions = {"bf16": numbers, "fp32": numbers.float(), "finer": numbers.float() * 1.003}
    for name, tensor in versions.items():
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors")
    same = diff(tmp_path / "bf16", tmp_path / "fp32")
    assert same.is_same
    assert same.dtypes == {("bfloat16", "float32"): 1}
    further = diff(tmp_path / "finer", tmp_path / "bf16")
    assert not further.is_rounding
    (rounded,) = further.values
    expected = (versions["finer"].double() - numbers.double()).abs().nan_to_num()
    assert rounded.largest == expected.max().item()
    # This is less than half a step of bf16 for some elements only.
    assert not rounded.is_rounding
    (tmp_path / "rounded").mkdir()
    save_file({"weight": versions["finer"].bfloat16()}, tmp_path / "rounded/model.safetensors")
    found = diff(tmp_path / "finer", tmp_path / "rounded")
    assert found.is_rounding
    assert not found.is_same
    assert found.values[0].is_rounding


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_whole_numbers_are_no_rounding(dtype, tmp_path):
    numbers = torch.full((3, 4), 0.25)
    for name, tensor in {"weights": numbers, "whole": numbers.to(dtype)}.items():
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors")
    for folders in (("weights", "whole"), ("whole", "weights")):
        found = diff(*(tmp_path / name for name in folders))
        assert len(found.values) == 1
        assert not found.is_rounding


def test_long_rows_and_many_blocks(tmp_path):
    generator = torch.Generator().manual_seed(2)
    wide = torch.randint(0, 2**16, (3, 2**21), generator=generator).to(torch.int16).view(torch.bfloat16)
    long = torch.randint(-9, 9, (3 * 2**20 + 5,), generator=generator).to(torch.int8)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save_file(
            {"wide": wide, "long": long, "scalar": torch.tensor(folder == "a")}, tmp_path / folder / "model.safetensors"
        )
        wide[1, 2**21 - 1], long[-1] = 0.0, 100
    found = {each.name: each for each in diff(tmp_path / "a", tmp_path / "b").values}
    assert {name: each.first for name, each in found.items()} == {
        "wide": (1, 2**21 - 1),
        "long": (3 * 2**20 + 4,),
        "scalar": (),
    }


def test_reading_takes_the_same_memory_again_and_again(model, tmp_path):
    """As glibc's heap grows with aligned allocations of many sizes."""
    convert(model, tmp_path / "megatron", SIZES)
    weights = weights_of(open_checkpoint(tmp_path / "megatron"), architecture_of(MODELS[FAMILY]))
    widest = max(weights.shapes, key=lambda name: Box.whole(weights.shapes[name]).size)
    names = [widest, *weights.shapes]
    assert len({weights.read(name, Box.whole(weights.shapes[name])).data_ptr() for name in names}) == 1


def test_missing_tensors_and_other_shapes_are_named(tmp_path):
    name, other = "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"
    a = write(tmp_path / "a", extra=torch.ones(2))
    b = write(tmp_path / "b", **{name: torch.ones(3, 3), other: None})
    found = diff(a, b)
    assert (found.only_in_a, found.only_in_b) == ([other, "extra"], [])
    assert found.shapes[name][1] == (3, 3)
    assert not found.values
    assert not found.is_same


def test_copies_may_be_missing_where_they_are_copies(model, tmp_path):
    copy, original = "model.layers.4.shared_head.head.weight", "lm_head.weight"
    without = write(tmp_path / "without", **{copy: None})
    assert diff(model, without).is_same
    assert diff(without, model).is_same
    wrong = write(tmp_path / "wrong", **{copy: load_file(model / "model.safetensors")[original] + 1})
    assert [each.name for each in diff(wrong, without).values] == [copy]
    convert(model, tmp_path / "megatron")
    assert [each.name for each in diff(tmp_path / "megatron", wrong).values] == [copy]


def test_tensors_that_nothing_reads_do_not_count(model, tmp_path):
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert diff(write(tmp_path / "released", **{unused: torch.ones(1)}), model).is_same


def test_fp8_is_compared_as_what_it_is_decoded_to(model, tmp_path):
    convert(model, tmp_path / "megatron")
    export(tmp_path / "megatron", tmp_path / "fp8", fp8=True)
    convert(tmp_path / "fp8", tmp_path / "decoded", dtype="bf16")
    assert diff(tmp_path / "fp8", tmp_path / "decoded").is_same
    found = diff(tmp_path / "fp8", model)
    assert not found.only_in_a
    assert 0 < len(found.values) < found.compared
    # e4m3 has three bits after the first: a value is off by 1/16 of itself at most, or of the smallest normal code.
    assert max(each.largest for each in found.values) < 5 / 16


def test_another_configuration_is_another_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    config = {**MODELS[FAMILY], "rms_norm_eps": 1e-5, "torch_dtype": "float32"}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    found = diff(model, tmp_path / "other")
    assert found.config == {"layernorm_epsilon": (1e-6, 1e-5)}
    assert not found.is_same


def test_where_the_names_of_a_megatron_checkpoint_come_from(model, tmp_path):
    convert(model, tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron/release", tmp_path / "apart/release")
    shutil.copytree(tmp_path / "megatron/release", tmp_path / "again/release")
    apart, again = tmp_path / "apart/release", tmp_path / "again/release"
    assert diff(apart, model).is_same
    assert diff(tmp_path / "megatron", apart).is_same
    assert diff(apart, again, hf_config_folder=model).is_same
    with pytest.raises(UserError, match=r"apart/release comes without the config.json .* with --hf-config"):
        diff(apart, again)


def test_models_of_unknown_families_are_compared_by_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "gpt2"}')
        save_file({"wte": torch.arange(6.0)}, tmp_path / name / "model.safetensors")
    assert diff(tmp_path / "a", tmp_path / "b").is_same


@pytest.mark.parametrize(("folder", "says"), [("none", "is not a folder"), ("empty", "holds no checkpoint")])
def test_no_checkpoint_is_said(folder, says, model, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=says):
        diff(model, tmp_path / folder)
