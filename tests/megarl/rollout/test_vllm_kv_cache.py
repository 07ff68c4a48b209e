"""Keys and values of vLLM in FP8, and those of transformers rounded in the same way."""

import pytest
import torch
from engine_host import Served
from rounded_cache import check_that_keys_and_values_are_rounded

from converters.errors import UserError
from megarl.rollout.vllm import cpu
from megarl.rollout.vllm.arguments import make_engine_config


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's attention in FP8 needs a CPU with AVX-512")
def test_greedy_equals_huggingface_with_rounded_keys_and_values(host, folders):
    served = Served(host.start(folders[0], kv_cache_dtype="fp8"), folders)
    check_that_keys_and_values_are_rounded(served)
    shapes = {name: tuple(tensor.shape) for name, tensor in served.first.tensors.items()}
    (trace,) = served.engine.trace_layout(shapes, dict.fromkeys(shapes, torch.float32))
    assert trace.unpacked().untraced == {}


@pytest.mark.parametrize(
    ("config", "value", "says"),
    [
        ({"kv_lora_rank": 512, "head_dim": 64}, "fp8", "kv_cache_dtype=fp8 is not for multi-latent attention on a CPU"),
        ({"head_dim": 80}, "fp8_e4m3", "kv_cache_dtype=fp8_e4m3 needs heads of a multiple of 32 on a CPU, .* have 80"),
        ({"head_dim": None, "hidden_size": 96, "num_attention_heads": 2}, "fp8", "and the model's have 48"),
    ],
)
def test_keys_and_values_that_a_cpu_cannot_hold_are_refused(config, value, says):
    cpu.kv_cache.check(config, {"kv_cache_dtype": "auto"})
    with pytest.raises(UserError, match=says):
        cpu.kv_cache.check(config, {"kv_cache_dtype": value})


def test_they_are_refused_before_the_engine_starts(vllm_process, model_folder):
    with pytest.raises(UserError, match="kv_cache_dtype=fp8 is not for multi-latent attention on a CPU"):
        vllm_process(make_engine_config, model_folder("deepseek_v3", 0), {"kv_cache_dtype": "fp8"})


def test_a_cpu_without_the_instructions_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    with pytest.raises(UserError, match="needs a CPU with AVX-512, and this one has none"):
        cpu.kv_cache.check({"head_dim": 64}, {"kv_cache_dtype": "fp8"})
