"""Keys and values of vLLM in FP8 with scales that follow from the weights, beside transformers that rounds by them."""

import math
import shutil

import pytest
import torch
from engine_host import GREEDY, PROMPTS, Served
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from converters.errors import UserError
from megarl.rollout.kv_scales import with_kv_scales
from megarl.rollout.protocol import Request
from megarl.schema import RolloutConfig

LARGE = 2.0**12
FP8 = RolloutConfig(kv_scales="bound", engine_args={"kv_cache_dtype": "fp8"})
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's attention in FP8 needs a CPU with AVX-512"
)


class Rounded(DynamicCache):
    """A cache of e4m3 over the scales of each layer; no key and no value may be beyond them."""

    def __init__(self, scales):
        super().__init__()
        self._scales = scales

    def update(self, key_states, value_states, layer_idx, *arguments, **given):
        rounded = []
        for states, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True):
            assert (states / scale).abs().max() <= 448
            rounded.append((states / scale).to(torch.float8_e4m3fn).float() * scale)
        return super().update(*rounded, layer_idx, *arguments, **given)


def power_of_two(largest):
    return 2.0 ** math.ceil(math.log2(largest / 448))


def scales_of(model):
    """The powers of two that follow from the weights of each layer, by the formula."""
    return [scales_of_layer(layer, model.config) for layer in model.model.layers]


def scales_of_layer(layer, config):
    attention, extra = layer.self_attn, 1.0 if config.model_type == "gemma2" else 0.0
    gains = math.sqrt(config.hidden_size) * (layer.input_layernorm.weight + extra)

    def largest(projection):
        bias = 0.0 if projection.bias is None else projection.bias.abs()
        return float(((projection.weight * gains).norm(dim=1) + bias).max())

    keys = largest(attention.k_proj)
    if hasattr(attention, "k_norm"):
        keys = float(math.sqrt(attention.head_dim) * attention.k_norm.weight.abs().max())
    return power_of_two(math.sqrt(2) * keys), power_of_two(largest(attention.v_proj))


def enlarged(folder, target, larger, smaller):
    """The model in `target`, with what has `larger` in its name LARGE times as large, and what has `smaller` less.

    Biases of large keys are larger than anything that their weights make.
    """
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name] += 30
        tensors[name] *= LARGE if larger in name else 1 / LARGE if smaller in name else 1
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
def large_folders(model_folder, tmp_path, name):
    """A model with large keys and another one with large values: the scales of one are wrong for the other."""
    normed = "k_norm" in str(load_file(model_folder(name, 0) / "model.safetensors").keys())
    keys = ("k_norm.", "q_norm.") if normed else ("k_proj.", "q_proj.")
    return (
        enlarged(model_folder(name, 0), tmp_path / "keys", *keys),
        enlarged(model_folder(name, 1), tmp_path / "values", "v_proj.", "o_proj."),
    )


@torch.no_grad()
def check_rounded(engine, folder):
    """See that the engine's greedy samples are those of transformers whose cache is rounded by the formula's scales."""
    # The faster attention of transformers leaves out the soft cap of Gemma 2.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    scales = scales_of(model)
    for prompt, (generation,) in zip(
        PROMPTS, engine.generate([Request(prompt, GREEDY) for prompt in PROMPTS]), strict=True
    ):
        answer = generation.token_ids.tolist()
        rows = model(torch.tensor([prompt + answer]), past_key_values=Rounded(scales)).logits[0, len(prompt) - 1 : -1]
        best = rows.log_softmax(-1).max(-1)
        assert answer == best.indices.tolist()
        # A number beside a tie of e4m3 may be rounded to the other side.
        assert torch.allclose(torch.tensor(generation.log_probs), best.values, atol=2e-3)


@needs_avx512
@pytest.mark.parametrize(
    "name",
    ["qwen2", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3_moe", "llama", "gemma2", "glm4_moe"))],
)
def test_scales_follow_the_weights_through_both_kinds_of_refit(host, large_folders, make_trainer):
    engine = host.start(large_folders[0], **with_kv_scales(FP8, FP8.engine_args))
    check_rounded(engine, large_folders[0])
    served = Served(engine, large_folders)
    served.update(served.second, 1)
    check_rounded(engine, large_folders[1])
    trainer = make_trainer(engine, large_folders[0])
    trainer.connect()
    trainer.load(large_folders[0])
    trainer.update(2)
    check_rounded(engine, large_folders[0])


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        (RolloutConfig(kv_scales="bound"), "for keys and values in FP8, and .*kv_cache_dtype is not set: set that to"),
        (RolloutConfig(kv_scales="bound", engine_args={"kv_cache_dtype": "bfloat16"}), "kv_cache_dtype is bfloat16"),
        (RolloutConfig(engine="sglang", kv_scales="bound"), "not for rollout.engine=sglang, .* or take one of vllm"),
    ],
)
def test_engines_without_such_scales_are_refused(rollout, says):
    with pytest.raises(UserError, match=says):
        with_kv_scales(rollout, rollout.engine_args)
    assert with_kv_scales(RolloutConfig(), {"a": 1}) == {"a": 1}
