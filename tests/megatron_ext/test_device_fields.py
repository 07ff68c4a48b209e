"""Which fields of TransformerConfig follow from the device; that of a GPU is asked for with faked answers of torch."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from small_configs import make_config

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext.model.model import transformer_config
from megatron_ext.model.specs import module_names
from megatron_ext.options.device_fields import LOCAL, TRANSFORMER_ENGINE, default_fields, required_fields

_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
KERNELS = (
    (_TRANSFORMER_ENGINE, "HAVE_TE"),
    (_TRANSFORMER_ENGINE, "fused_permute_with_probs"),
    ("megatron.core.models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb_thd"),
    ("megatron.core.fusions.fused_mla_yarn_rope_apply", "HAVE_TRITON"),
)
PLAIN = {"bias_activation_fusion", "bias_dropout_fusion", "deallocate_pipeline_outputs"}
WITH_KERNELS = {*PLAIN, "gradient_accumulation_fusion", "apply_rope_fusion"}


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Apex's kernel, where it is installed.
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)


@pytest.fixture
def kernels(cuda, monkeypatch):
    module = ModuleType("transformer_engine")
    module.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", module)
    for name, attribute in KERNELS:
        monkeypatch.setattr(importlib.import_module(name), attribute, True)


def chosen(family, implementation=TRANSFORMER_ENGINE, **fields):
    return default_fields({**read_architecture(make_config(family)).transformer_config, **fields}, implementation)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("qwen3", {}, WITH_KERNELS),
        ("qwen3_moe", {}, {*WITH_KERNELS, "moe_permute_fusion"}),
        ("deepseek_v3", {"rope_type": "yarn"}, {*WITH_KERNELS, "moe_permute_fusion"}),
        # The kernel of latent attention knows yarn alone, that of packed sequences no interleaved rotation.
        ("deepseek_v3", {"rope_type": "rope"}, {*WITH_KERNELS, "moe_permute_fusion"} - {"apply_rope_fusion"}),
        ("qwen3", {"rotary_interleaved": True}, WITH_KERNELS - {"apply_rope_fusion"}),
        ("qwen3", {"activation_func": torch.nn.functional.gelu}, WITH_KERNELS - {"bias_activation_fusion"}),
        ("qwen3", {"use_te_activation_func": True}, WITH_KERNELS - {"bias_activation_fusion"}),
        ("qwen3", {"add_bias_linear": True}, WITH_KERNELS - {"bias_dropout_fusion"}),
    ],
)
def test_on_cuda_the_defaults_are_those_of_megatrons_training(kernels, family, fields, expected):
    assert chosen(family, **fields) == dict.fromkeys(expected, True)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_without_transformer_engine_what_needs_it_is_off(cuda, family):
    check_that_local_modules_have_no_kernels(family)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_where_it_is_installed_it_is_off_in_local_modules(kernels, family):
    check_that_local_modules_have_no_kernels(family)


def check_that_local_modules_have_no_kernels(family):
    required = required_fields({}, LOCAL)
    assert not any(required.values())
    assert {"deallocate_pipeline_outputs", "use_cpu_initialization"}.isdisjoint(required)
    left = {name for name in chosen(family, LOCAL) if required.get(name, True)}
    assert left == PLAIN


def test_a_cpu_has_none():
    assert chosen("qwen3_moe", LOCAL) == {}
    assert required_fields({}, LOCAL)["deallocate_pipeline_outputs"] is False


def config(family="qwen3", params_dtype=torch.bfloat16, **overrides):
    architecture = read_architecture(make_config(family))
    return transformer_config(architecture, ParallelSizes(), params_dtype=params_dtype, overrides=overrides)


def test_fp32_is_multiplied_as_fp32(kernels):
    assert module_names(config(params_dtype=torch.float32)) == "local"
    with pytest.raises(UserError, match=r"^megatron\.transformer_impl=transformer_engine multiplies fp32 with .* TF32"):
        config(params_dtype=torch.float32, transformer_impl="transformer_engine")


def test_experts_whose_tokens_are_gathered_have_no_fused_permutation(kernels):
    gathering = {"moe_token_dispatcher_type": "allgather"}
    assert not config("qwen3_moe", **gathering).moe_permute_fusion
    with pytest.raises(UserError, match="moe_permute_fusion is True, but here it must be False"):
        config("qwen3_moe", **gathering, moe_permute_fusion=True)


def test_local_modules_may_be_chosen_beside_transformer_engine(kernels):
    assert module_names(config()) == "te"
    assert module_names(config(transformer_impl="local")) == "local"
    with pytest.raises(UserError, match=r"^megatron\.fp8=hybrid needs the modules of Transformer Engine"):
        config(transformer_impl="local", fp8="hybrid")
    with pytest.raises(UserError, match=r"^megatron\.transformer_impl=inference_optimized is not supported: "):
        config(transformer_impl="inference_optimized")
    # Its check passes where Transformer Engine is, and the kernel is apex's.
    with pytest.raises(UserError, match="gradient_accumulation_fusion is True, but here it must be False"):
        config(transformer_impl="local", gradient_accumulation_fusion=True)


def test_modules_that_are_not_there_are_refused():
    assert module_names(config()) == module_names(config(transformer_impl="local")) == "local"
    with pytest.raises(UserError, match=r"^megatron\.transformer_impl=transformer_engine needs Transformer Engine on"):
        config(transformer_impl="transformer_engine")


def test_what_is_given_wins(cuda):
    assert config().bias_activation_fusion
    assert not config(bias_activation_fusion=False).bias_activation_fusion
    assert config(bias_activation_fusion=False).bias_dropout_fusion
    with pytest.raises(UserError, match="apply_rope_fusion is True, but here it must be False"):
        config(apply_rope_fusion=True)


def test_experts_that_deepep_sends_tokens_to_need_it(monkeypatch):
    deepep = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    with pytest.raises(
        UserError, match=r"^megatron\.moe_token_dispatcher_type=flex is not .* deep_ep: .*; use alltoall"
    ):
        config("qwen3_moe", **deepep)
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert config("qwen3_moe", **deepep).moe_flex_dispatcher_backend == "deepep"
