"""HuggingFace to Megatron to HuggingFace: every tensor has the bits, the type and the name that it had."""

import json

import pytest
import torch
from conversions import (
    BF16,
    FP8,
    FP32,
    MODELS,
    architecture_of,
    content_of,
    contents,
    convert,
    export,
    make,
    random_numbers,
    random_tensors,
    raw,
    write_model,
)

from converters.architectures import FAMILIES
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import quantisation_config
from converters.layouts.megatron import ParallelSizes

TP2 = {"world_size": 2, "tensor_model_parallel_size": 2}
TP4 = {"world_size": 4, "tensor_model_parallel_size": 4}
PP2 = {"world_size": 2, "pipeline_model_parallel_size": 2}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "one rank": {},
    "TP2 ETP1 EP2": {**TP2, **EP2},
    "TP2 ETP2 EP2": {**TP2, "world_size": 4, "expert_model_parallel_size": 2},
    "TP4, fewer key-value heads": {**TP4, "expert_tensor_parallel_size": 2},
    "PP2 uneven": {**PP2, **UNEVEN},
    "PP2 VPP2": {**PP2, "virtual_pipeline_model_parallel_size": 2},
    "TP2 PP2 EP2": {**TP2, **PP2, **EP2, "world_size": 4},
}
WITHOUT_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def sizes_for(name: str, layout: str) -> ParallelSizes:
    fields = LAYOUTS[layout]
    if not architecture_of(MODELS[name]).num_experts:
        fields = {field: value for field, value in fields.items() if field not in WITHOUT_EXPERTS}
    return ParallelSizes(**fields)


def test_every_family_is_here():
    assert {config["model_type"] for config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["TP2 PP2 EP2", "PP2 uneven"])
def test_the_round_trip_keeps_every_bit(name, layout, tmp_path):
    folder = make(tmp_path / "hf", name)
    convert(folder, tmp_path / "megatron", sizes_for(name, layout), vocabulary_multiple=16)
    export(tmp_path / "megatron", tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


@pytest.mark.parametrize("name", ["llama", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_round_trip_at_every_layout(name, layout, tmp_path):
    tensors = random_tensors(MODELS[name])
    folder = write_model(tmp_path / "hf", MODELS[name], tensors, files=3)
    convert(folder, tmp_path / "megatron", sizes_for(name, layout), vocabulary_multiple=5, workers=2)
    export(tmp_path / "megatron", tmp_path / "back", shard_size_bytes=2000, workers=2)
    assert content_of(tmp_path / "back") == contents(tensors)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(raw(tensor)) for tensor in tensors.values())
    assert (tmp_path / "back/tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", {"dtype": FP32}),
        ("deepseek_v3", {"dtype": FP32}),
        ("mixtral", {"dtype": torch.float16}),
        # As training in mixed precision may leave them.
        ("qwen3_moe", {"dtypes": {"model.norm.weight": FP32, "lm_head.weight": FP32}}),
        ("qwen3_tied", {"copies": ("lm_head.weight",)}),
        ("deepseek_v3", {"copies": ()}),
        ("deepseek_v3_two_mtp", {"copies": ("model.layers.5.embed_tokens.weight",)}),
        ("deepseek_v3_tied", {"copies": ("lm_head.weight", "model.layers.4.shared_head.head.weight")}),
    ],
)
def test_the_round_trip_keeps_types_and_copies(name, options, tmp_path):
    folder = make(tmp_path / "hf", name, **options)
    convert(folder, tmp_path / "megatron", sizes_for(name, "TP2 PP2 EP2"))
    export(tmp_path / "megatron", tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


@pytest.mark.parametrize("wide", [0, 2])
def test_layers_under_one_key_get_the_widest_of_their_types(wide, tmp_path):
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(4)]
    tensors = random_tensors(MODELS["qwen3"], draw=random_numbers, dtypes={names[wide]: FP32})
    write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    convert(tmp_path / "hf", tmp_path / "megatron")
    export(tmp_path / "megatron", tmp_path / "back")
    expected = {name: each.float() if name in names else each for name, each in tensors.items()}
    assert content_of(tmp_path / "back") == contents(expected)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen2"])
@pytest.mark.parametrize(("choice", "dtype"), [("bf16", BF16), ("fp32", FP32)])
def test_weights_get_the_type_that_was_chosen_and_the_expert_bias_stays(name, choice, dtype, tmp_path):
    source = FP32 if dtype is BF16 else BF16
    tensors = random_tensors(MODELS[name], dtype=source, draw=random_numbers)
    write_model(tmp_path / "hf", MODELS[name], tensors)
    convert(tmp_path / "hf", tmp_path / "megatron", dtype=choice)
    export(tmp_path / "megatron", tmp_path / "back")
    types = architecture_of(MODELS[name]).hf_dtypes(dtype)
    expected = {name: each.to(types.get(name, dtype)) for name, each in tensors.items()}
    assert content_of(tmp_path / "back") == contents(expected)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_rows_beyond_the_vocabulary_are_zeros(tmp_path):
    folder = make(tmp_path / "hf", "qwen3")
    plan = convert(folder, tmp_path / "megatron", ParallelSizes(**TP4), vocabulary_multiple=8)
    assert plan.padded_vocabulary == 32
    checkpoint = TorchDistCheckpoint(tmp_path / "megatron")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        stored = checkpoint.weights[key]
        assert [chunk.box.shape for chunk in stored.chunks] == [(8, 8)] * 4
        rows = torch.cat([checkpoint.read(key, chunk) for chunk in stored.chunks])
        assert rows.shape == (32, 8)
        assert not rows[18:].view(torch.int16).any()


LARGE = {
    **MODELS["deepseek_v3"],
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
    "q_lora_rank": 130,
    "kv_lora_rank": 140,
    "n_group": 1,
    "topk_group": 1,
}
"""Wide enough for blocks of 128 x 128 that are not whole."""


def in_blocks(shape: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    return [
        (i, j, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        for i in range(-(-shape[0] // 128))
        for j in range(-(-shape[1] // 128))
    ]


def is_quantised(name: str) -> bool:
    return "_proj" in name and "eh_proj" not in name


def fp8_tensors() -> dict[str, torch.Tensor]:
    """The large model as it would be released: codes of all values, scales, and the rest in bf16."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, tensor in random_tensors(LARGE, draw=random_numbers).items():
        if not is_quantised(name):
            tensors[name] = tensor
            continue
        codes = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        blocks = tuple(-(-length // 128) for length in tensor.shape)
        tensors[name] = codes.view(FP8)
        tensors[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) * 1e-3 + 1e-5
    return tensors


def decoded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The published rule: code times scale in float32, rounded to bf16; the product is exact in float64."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dtype is not FP8:
            if not name.endswith("_scale_inv"):
                result[name] = tensor
            continue
        value = tensor.to(FP32).double()
        for i, j, rows, columns in in_blocks(tuple(tensor.shape)):
            value[rows, columns] *= tensors[f"{name}_scale_inv"][i, j].double()
        result[name] = value.to(FP32).to(BF16)
    return result


def encoded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The published rule, block by block: the scale is the largest magnitude / 448, the code the weight / scale."""
    result = {}
    for name, tensor in tensors.items():
        if not is_quantised(name):
            result[name] = tensor
            continue
        codes, scales = torch.empty(tensor.shape, dtype=FP8), torch.empty([-(-n // 128) for n in tensor.shape])
        for i, j, rows, columns in in_blocks(tuple(tensor.shape)):
            block = tensor[rows, columns].float()
            scale = torch.clamp(block.abs().max(), min=1e-10) / 448.0
            scales[i, j], codes[rows, columns] = scale, (block / scale).to(FP8)
        result[name], result[f"{name}_scale_inv"] = codes, scales
    return result


TP2_PP2_EP2 = ParallelSizes(**LAYOUTS["TP2 PP2 EP2"])


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory):
    """Tensors in FP8, and the checkpoint converted from them."""
    folder = tmp_path_factory.mktemp("fp8")
    tensors = fp8_tensors()
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config = {**LARGE, "quantization_config": {**quantisation, "weight_block_size": [128, 128]}}
    write_model(folder / "hf", config, tensors, files=2)
    convert(folder / "hf", folder / "megatron", TP2_PP2_EP2, dtype="bf16", workers=2)
    return tensors, folder / "megatron"


def test_fp8_becomes_the_bf16_of_the_published_rule(fp8_model, tmp_path):
    tensors, megatron = fp8_model
    export(megatron, tmp_path / "back")
    assert content_of(tmp_path / "back") == contents(decoded(tensors))
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize(("dtype", "name"), [("keep", "bfloat16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_the_config_beside_a_checkpoint_is_that_of_its_weights(dtype, name, tmp_path):
    quantisation = quantisation_config(architecture_of(LARGE))
    write_model(
        tmp_path / "hf",
        {**LARGE, "quantization_config": quantisation},
        encoded(random_tensors(LARGE, draw=random_numbers)),
    )
    convert(tmp_path / "hf", tmp_path / "megatron", dtype=dtype)
    config = json.loads((tmp_path / "megatron/huggingface/config.json").read_text())
    assert config == {**LARGE, "dtype": name}


def test_fp8_through_megatron_is_what_encoding_its_bf16_gives(fp8_model, tmp_path):
    tensors, megatron = fp8_model
    export(megatron, tmp_path / "back", fp8=True, workers=2, shard_size_bytes=100_000)
    expected = encoded(decoded(tensors))
    assert content_of(tmp_path / "back") == contents(expected)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    # Most blocks of random codes hold one near 448: the second encoding is not far from the first.
    for name in (name for name in expected if expected[name].dtype is FP8):
        first, second = decoded({n: tensors[n] for n in (name, f"{name}_scale_inv")})[name], expected[name]
        again = decoded({name: second, f"{name}_scale_inv": expected[f"{name}_scale_inv"]})[name]
        # Half a step of a code with 3 bits after the point, of numbers or of the smallest ones, and bf16's rounding.
        bound = first.abs().float() * (2**-4 + 2**-8) + 2**-10 * expected[f"{name}_scale_inv"].max()
        assert ((first.float() - again.float()).abs() <= bound).all()


@pytest.mark.parametrize("layout", ["one rank", "TP2 PP2 EP2"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_an_export_in_fp8_has_the_codes_and_scales_of_the_published_rule(layout, dtype, tmp_path):
    tensors = random_tensors(LARGE, dtype=dtype, draw=random_numbers)
    tensors["model.layers.0.mlp.down_proj.weight"][:128, :128] = 0  # a block of zeros
    write_model(tmp_path / "hf", LARGE, tensors)
    convert(tmp_path / "hf", tmp_path / "megatron", ParallelSizes(**LAYOUTS[layout]))
    export(tmp_path / "megatron", tmp_path / "fp8", fp8=True)
    assert content_of(tmp_path / "fp8") == contents(encoded(tensors))
    # And what was exported is converted again.
    convert(tmp_path / "fp8", tmp_path / "again", dtype="bf16")
    export(tmp_path / "again", tmp_path / "bf16")
    types = architecture_of(LARGE).hf_dtypes(BF16)
    expected = {name: each.to(types.get(name, BF16)) for name, each in decoded(encoded(tensors)).items()}
    assert content_of(tmp_path / "bf16") == contents(expected)
