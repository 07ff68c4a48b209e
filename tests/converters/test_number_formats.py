"""Number formats: what is in them, how many bytes, and which models do not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import make_config

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.fp8 import is_block_fp8
from converters.number_formats import (
    AS_TRAINED,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    INT8_CHANNEL,
    MXFP8,
    NUMBER_FORMATS,
    NVFP4,
    number_format,
)

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
HEADS = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 1}


def intervals(length):
    return st.tuples(st.integers(0, length), st.integers(0, length)).filter(lambda pair: pair[0] < pair[1])


@pytest.mark.parametrize("number_format", NUMBER_FORMATS.values(), ids=list(NUMBER_FORMATS))
@settings(max_examples=40)
@given(rows=intervals(150), columns=intervals(260))
def test_scales_belong_to_the_blocks_that_a_box_reaches_into(number_format, rows, columns):
    shape = (150, 260)
    height, width = map(min, number_format.block, shape)
    box = Box((rows[0], columns[0]), (rows[1], columns[1]))
    mark = torch.zeros(shape, dtype=torch.bool)
    mark[box.slices()] = True
    own = torch.zeros(number_format.scales_box(Box.whole(shape)).shape, dtype=torch.bool)
    assert own.shape == (-(-150 // height), -(-260 // width))
    own[number_format.scales_box(box).slices()] = True
    whole = torch.zeros(shape, dtype=torch.bool)
    for row, column in own.nonzero().tolist():
        block = (slice(height * row, height * row + height), slice(width * column, width * column + width))
        assert mark[block].any()
        whole[block] = True
    assert number_format.is_whole(box, shape) == torch.equal(mark, whole)
    codes = -(-box.size // number_format.elements_per_code)
    assert number_format.held_bytes(box) == codes + number_format.scales.itemsize * int(own.sum())
    assert number_format.least_bytes(box) <= number_format.held_bytes(box)


@pytest.mark.parametrize("number_format", NUMBER_FORMATS.values(), ids=list(NUMBER_FORMATS))
def test_a_checkpoint_has_the_scales_after_their_tensor(number_format):
    architecture = read_architecture(make_config("qwen3", **HEADS))
    shapes, dtypes = number_format.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    quantised = number_format.quantised_names(architecture)
    names, of_quantised = list(shapes), set[str]()
    for name in quantised:
        # Each format has a scale of which one is a code, or nearly.
        weight = torch.ones(architecture.hf_shapes[name])
        found = dict(number_format.tensors(name, weight))
        codes, scales, *constants = found
        assert (codes, scales) == (name + number_format.codes_suffix, name + number_format.scales_suffix)
        at = names.index(codes)
        assert names[at : at + len(found)] == list(found)
        assert {each: (shapes[each], dtypes[each]) for each in found} == {
            each: (tuple(tensor.shape), tensor.dtype) for each, tensor in found.items()
        }
        assert [found[each].item() for each in constants] == [number_format.global_scale] * len(constants)
        decoded = number_format.dequantise(found[codes], found[scales], torch.bfloat16)
        assert decoded.shape == weight.shape
        assert torch.allclose(decoded, torch.ones((), dtype=torch.bfloat16), rtol=0.05)
        of_quantised |= found.keys()
    assert shapes.keys() == dtypes.keys() == (architecture.hf_shapes.keys() - quantised) | of_quantised
    assert dtypes["lm_head.weight"] is torch.float32
    config = number_format.engine_config(architecture)
    kept = config.get("ignore") or config["modules_to_not_convert"]
    assert kept == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("number_format", [INT8_CHANNEL, MXFP8, NVFP4], ids=lambda each: each.name)
def test_the_rows_of_a_second_tile_are_quantised_like_those_of_the_first(number_format):
    weight = torch.linspace(-1, 1, (2**15 + 1) * 32).view(-1, 32)  # a tile of 2**20 elements, and a row
    codes, scales = number_format.quantise(weight)
    for rows in (slice(3), slice(-1, None)):
        own_codes, own_scales = number_format.quantise(weight[rows])
        assert torch.equal(codes[rows].view(torch.uint8), own_codes.view(torch.uint8))
        assert torch.equal(scales[rows].view(torch.uint8), own_scales.view(torch.uint8))
    weight[-1, 5] = torch.nan
    with pytest.raises(ValueError, match=r"^(row|block) 32768\b.* holds a weight that is NaN"):
        number_format.quantise(weight)


def test_mxfp8_is_for_columns_of_whole_blocks():
    fits = read_architecture(make_config("qwen3", **HEADS))
    MXFP8.check(fits, 8, 8)
    INT8_CHANNEL.check(fits, 8, 8)
    with pytest.raises(UserError, match=r"mxfp8 needs .* 32 columns, and .*o_proj.weight has 256, .* over 16 ranks"):
        MXFP8.check(fits, 16, 16)
    odd = read_architecture(make_config("qwen3", **{**HEADS, "hidden_size": 240}))
    NVFP4.check(odd, 16, 16)
    with pytest.raises(UserError, match=r"nvfp4 needs .* 16 columns, and .*o_proj.weight has 256, .* over 32 ranks"):
        NVFP4.check(odd, 32, 32)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.gate_proj\.weight has 240: take a model"):
        MXFP8.check(odd, 1, 1)


def test_a_checkpoint_whose_scales_are_powers_of_two_says_so():
    architecture = read_architecture(make_config("qwen3", **HEADS))
    plain, powers = (each.engine_config(architecture) for each in (FP8_BLOCK, FP8_BLOCK_UE8M0))
    assert powers == {**plain, "scale_fmt": "ue8m0"}
    assert is_block_fp8({"quantization_config": powers})


@pytest.mark.parametrize("number_format", [FP8_BLOCK, FP8_BLOCK_UE8M0], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("fields", "tensor_parallel", "says"),
    [
        ({"head_dim": 32}, 1, r"layers\.0\.self_attn\.k_proj\.weight has 64 rows, on which the engine puts another"),
        ({"intermediate_size": 192}, 1, r"layers\.0\.mlp\.gate_proj\.weight has 192 rows"),
        ({}, 2, r"cuts model\.layers\.0\.self_attn\.k_proj\.weight over 2 ranks cuts its 128"),
        ({"num_key_value_heads": 4}, 4, r"self_attn\.k_proj\.weight over 4 ranks cuts its 256 through them"),
    ],
)
def test_a_model_whose_blocks_an_engine_would_cut_is_refused(number_format, fields, tensor_parallel, says):
    architecture = read_architecture(make_config("qwen3", **{**HEADS, **fields}))
    with pytest.raises(
        UserError, match=f"^rollout.weights={number_format.name} needs blocks of 128 x 128, and .*{says}"
    ):
        number_format.check(architecture, tensor_parallel, tensor_parallel)


@pytest.mark.parametrize(
    ("fields", "tensor_parallel"),
    [({}, 1), ({"num_key_value_heads": 4}, 2), ({"num_key_value_heads": 1, "head_dim": 128}, 2)],
)
def test_a_model_that_fits_is_not(fields, tensor_parallel):
    FP8_BLOCK.check(read_architecture(make_config("qwen3", **{**HEADS, **fields})), tensor_parallel, tensor_parallel)


def test_experts_that_are_not_cut_fit():
    experts = {"num_experts": 2, "moe_intermediate_size": 128, "num_key_value_heads": 4}
    architecture = read_architecture(make_config("qwen3_moe", **{**HEADS, **experts}))
    FP8_BLOCK.check(architecture, 2, 1)
    with pytest.raises(UserError, match=r"experts\.0\.down_proj\.weight over 2 ranks cuts its 128"):
        FP8_BLOCK.check(architecture, 2, 2)
    MXFP8.check(architecture, 8, 1)
    with pytest.raises(UserError, match=r"experts\.0\.down_proj\.weight has 128, which an engine cuts over 8 ranks"):
        MXFP8.check(architecture, 8, 8)


def test_formats_by_name():
    assert number_format(AS_TRAINED) is None
    assert [number_format(name) for name in NUMBER_FORMATS] == list(NUMBER_FORMATS.values())
    assert [each.title for each in NUMBER_FORMATS.values()] == [
        "block FP8",
        "block FP8 with powers of two",
        "INT8 per channel",
        "MXFP8",
        "NVFP4",
    ]
    with pytest.raises(
        UserError, match=r"'fp8_blocks': it is none of as_trained, fp8_block, .*; did you mean fp8_block"
    ):
        number_format("fp8_blocks")
