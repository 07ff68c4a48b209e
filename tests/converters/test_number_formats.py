"""Number formats: what is in them, how many bytes, and which models do not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_configs import make_config

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.fp8 import quantise, scales_shape
from converters.number_formats import AS_TRAINED, FP8_BLOCK, NUMBER_FORMATS, number_format

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
HEADS = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 1}


def intervals(length):
    return st.tuples(st.integers(0, length), st.integers(0, length)).filter(lambda pair: pair[0] < pair[1])


@given(rows=intervals(300), columns=intervals(520))
def test_scales_belong_to_the_blocks_that_a_box_reaches_into(rows, columns):
    shape = (300, 520)
    box = Box((rows[0], columns[0]), (rows[1], columns[1]))
    mark = torch.zeros(shape, dtype=torch.bool)
    mark[box.slices()] = True
    own = torch.zeros(scales_shape(shape), dtype=torch.bool)
    own[FP8_BLOCK.scales_box(box).slices()] = True
    whole = torch.zeros(shape, dtype=torch.bool)
    for row, column in own.nonzero().tolist():
        block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        assert mark[block].any()
        whole[block] = True
    assert FP8_BLOCK.is_whole(box, shape) == torch.equal(mark, whole)
    assert FP8_BLOCK.held_bytes(box) == box.size + 4 * int(own.sum())
    assert FP8_BLOCK.least_bytes(box) <= FP8_BLOCK.held_bytes(box)


def test_a_checkpoint_has_the_scales_after_their_tensor():
    architecture = read_architecture(make_config("qwen3", **HEADS))
    shapes, dtypes = FP8_BLOCK.checkpoint(architecture, architecture.hf_dtypes(torch.float32))
    quantised = FP8_BLOCK.quantised_names(architecture)
    assert shapes.keys() == dtypes.keys() == architecture.hf_shapes.keys() | {f"{name}_scale_inv" for name in quantised}
    names = list(shapes)
    for name in quantised:
        assert (dtypes[name], dtypes[f"{name}_scale_inv"]) == (torch.float8_e4m3fn, torch.float32)
        assert names[names.index(name) + 1] == f"{name}_scale_inv"
        codes, scales = FP8_BLOCK.quantise(torch.ones(shapes[name]))
        assert (tuple(codes.shape), tuple(scales.shape)) == (shapes[name], shapes[f"{name}_scale_inv"])
    assert dtypes["lm_head.weight"] is torch.float32


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
    with pytest.raises(UserError, match=r"'fp8_blocks': it is none of as_trained, fp8_block; did you mean fp8_block"):
        number_format("fp8_blocks")
