"""Soft caps of attention in SGLang: what its server is given, and how it computes on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from converters.errors import UserError
from megarl.rollout.sglang import cpu
from megarl.rollout.sglang.arguments import server_arguments
from megarl.rollout.sglang.soft_cap import with_capping_attention
from megatron_ext import device


@pytest.fixture
def on_gpu(monkeypatch):
    """Plays a GPU of this compute capability: `on_gpu((9, 0))`."""

    def play(capability):
        monkeypatch.setattr(device, "backend", lambda: "nccl")
        monkeypatch.setattr(device, "compute_capability", lambda: capability)

    return play


def arguments(folder, given):
    return with_capping_attention(server_arguments(folder, given, 1, "key"))


@pytest.mark.parametrize(
    ("capability", "given", "backend"),
    [
        ((8, 0), {}, "triton"),
        ((8, 9), {"attention_backend": None}, "triton"),
        ((9, 0), {}, "fa3"),
        ((10, 0), {"decode_attention_backend": "triton"}, "triton"),
        ((12, 0), {}, "triton"),
        ((8, 0), {"attention_backend": "fa3", "model_impl": "sglang"}, "fa3"),
        ((9, 0), {"attention_backend": "triton"}, "triton"),
    ],
)
def test_a_model_with_soft_caps_has_attention_that_caps(model_folder, on_gpu, capability, given, backend):
    on_gpu(capability)
    found = arguments(model_folder("gemma2", 0), given)
    assert found["attention_backend"] == backend
    assert found.items() >= {name: value for name, value in given.items() if value}.items()


def test_on_a_cpu_it_has_the_one_that_is_there(model_folder):
    assert arguments(model_folder("gemma2", 0), {})["attention_backend"] == "torch_native"
    with pytest.raises(UserError, match=r"attention_backend=intel_amx is not supported .*; use torch_native$"):
        arguments(model_folder("gemma2", 0), {"attention_backend": "intel_amx"})


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        *(("attention_backend", each, "fa3 or triton") for each in ("flashinfer", "trtllm_mha", "torch_native", "fa4")),
        ("prefill_attention_backend", "flashinfer", "fa3 or triton"),
        ("decode_attention_backend", "trtllm_mha", "fa3 or triton"),
        ("model_impl", "transformers", "auto or sglang"),
    ],
)
def test_attention_that_leaves_out_a_soft_cap_is_refused(model_folder, on_gpu, name, value, advice):
    on_gpu((9, 0))
    with pytest.raises(
        UserError, match=rf"engine_args\.{name}={value} is not supported with a model .*; use {advice}$"
    ):
        arguments(model_folder("gemma2", 0), {name: value})
    assert arguments(model_folder("qwen3", 0), {name: value})[name] == value


def test_a_model_without_soft_caps_is_given_no_attention(model_folder, on_gpu):
    on_gpu((10, 0))
    assert "attention_backend" not in arguments(model_folder("qwen3", 0), {})


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mask", ["causal", "window", None])
def test_scores_are_capped_before_the_mask(heads, mask):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, each, 5, 8, generator=generator) for each in (4, heads, heads))
    window = torch.ones(5, 5).tril().triu(-2).bool() if mask == "window" else None
    options = {"attn_mask": window, "enable_gqa": heads < 4, "scale": 0.7, "is_causal": mask == "causal"}
    uncapped = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(cpu.soft_cap.capped_attention(1e4, query, key, value, **options), uncapped)
    found = cpu.soft_cap.capped_attention(1.5, query, key, value, **options)
    key, value = (each.repeat_interleave(4 // heads, dim=1) for each in (key, value))
    seen = {"causal": torch.ones(5, 5).tril(), "window": window, None: torch.ones(5, 5)}[mask]
    weights = (1.5 * (0.7 * (query @ key.mT) / 1.5).tanh()).exp() * seen
    torch.testing.assert_close(found, weights / weights.sum(-1, keepdim=True) @ value)
    assert not torch.allclose(found, uncapped, atol=1e-2)
