"""Number formats: what is in them, how many bytes, and which models do not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import make_config

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.fp8 import quantise
from converters.number_formats import AS_TRAINED, FP8_BLOCK, INT8_CHANNEL, MXFP8, NUMBER_FORMATS, number_format

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
    assert number_format.held_bytes(box) == box.size + number_format.scales.itemsize * int(own.sum())
    assert number_format.least_bytes(box) <= number_format.held_bytes(box)


@pytest.mark.parametrize("number_format", NUMBER_FORMATS.values(), ids=list(NUMBER_FORMATS))
def test_a_checkpoint_has_the_scales_after_their_tensor(number_format):
    architecture = read_architecture(make_config("qwen3", **HEADS))
    shapes, dtypes = number_format.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    quantised = number_format.quantised_names(architecture)
    scales_of = {name: name + number_format.scales_suffix for name in quantised}
    assert shapes.keys() == dtypes.keys() == architecture.hf_shapes.keys() | set(scales_of.values())
    names = list(shapes)
    for name, scales_name in scales_of.items():
        assert (dtypes[name], dtypes[scales_name]) == (number_format.codes, number_format.scales)
        assert names[names.index(name) + 1] == scales_name
        codes, scales = number_format.quantise(torch.ones(shapes[name]))
        assert (tuple(codes.shape), tuple(scales.shape)) == (shapes[name], shapes[scales_name])
        # Ones are no code's neighbours in any of the formats, but a part of them.
        assert (number_format.dequantise(codes, scales, torch.bfloat16) == 1).all()
    assert dtypes["lm_head.weight"] is torch.float32
    config = number_format.engine_config(architecture)
    kept = config.get("ignore") or config["modules_to_not_convert"]
    assert kept == ["lm_head", "model.embed_tokens"]


def test_mxfp8_is_for_columns_of_whole_blocks():
    fits = read_architecture(make_config("qwen3", **HEADS))
    MXFP8.check(fits, 8, 8)
    INT8_CHANNEL.check(fits, 8, 8)
    with pytest.raises(UserError, match=r"mxfp8 needs .* 32 columns, and .*o_proj.weight has 256, .* over 16 ranks"):
        MXFP8.check(fits, 16, 16)
    odd = read_architecture(make_config("qwen3", **{**HEADS, "hidden_size": 240}))
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.gate_proj\.weight has 240: take a model"):
        MXFP8.check(odd, 1, 1)


def test_the_rule_is_that_of_checkpoints():
    weight = torch.randn(130, 200)
    for found, expected in zip(FP8_BLOCK.quantise(weight), quantise(weight), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("fields", "tensor_parallel", "says"),
    [
        ({"head_dim": 32}, 1, r"layers\.0\.self_attn\.k_proj\.weight has 64 rows, on which the engine puts another"),
        ({"intermediate_size": 192}, 1, r"layers\.0\.mlp\.gate_proj\.weight has 192 rows"),
        ({}, 2, r"cuts model\.layers\.0\.self_attn\.k_proj\.weight over 2 ranks cuts its 128"),
        ({"num_key_value_heads": 4}, 4, r"self_attn\.k_proj\.weight over 4 ranks cuts its 256 through them"),
    ],
)
def test_a_model_whose_blocks_an_engine_would_cut_is_refused(fields, tensor_parallel, says):
    architecture = read_architecture(make_config("qwen3", **{**HEADS, **fields}))
    with pytest.raises(UserError, match=f"^rollout.weights=fp8_block needs blocks of 128 x 128, and .*{says}"):
        FP8_BLOCK.check(architecture, tensor_parallel, tensor_parallel)


@pytest.mark.parametrize(("fields", "tensor_parallel"), [({}, 1), ({"num_key_value_heads": 4}, 2)])
def test_a_model_that_fits_is_not(fields, tensor_parallel):
    FP8_BLOCK.check(read_architecture(make_config("qwen3", **{**HEADS, **fields})), tensor_parallel, tensor_parallel)


def test_experts_that_are_not_cut_fit():
    experts = {"num_experts": 2, "moe_intermediate_size": 128, "num_key_value_heads": 4}
    architecture = read_architecture(make_config("qwen3_moe", **{**HEADS, **experts}))
    FP8_BLOCK.check(architecture, 2, 1)
    with pytest.raises(UserError, match=r"experts\.0\.down_proj\.weight over 2 ranks cuts its 128"):
        FP8_BLOCK.check(architecture, 2, 2)


def test_formats_by_name():
    assert number_format(AS_TRAINED) is None
    assert [number_format(name) for name in NUMBER_FORMATS] == list(NUMBER_FORMATS.values())
    assert [each.title for each in NUMBER_FORMATS.values()] == ["block FP8", "INT8 per channel", "MXFP8"]
    with pytest.raises(
        UserError, match=r"'fp8_blocks': it is none of as_trained, fp8_block, .*; did you mean fp8_block"
    ):
        number_format("fp8_blocks")
