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
from megatron_ext.options.device_fields import default_fields, required_fields

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


@pytest.fixture
def kernels(cuda, monkeypatch):
    module = ModuleType("transformer_engine")
    module.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", module)
    for name, attribute in KERNELS:
        monkeypatch.setattr(importlib.import_module(name), attribute, True)


def chosen(family, **fields):
    return default_fields({**read_architecture(make_config(family)).transformer_config, **fields})


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
    assert not any(required_fields().values())
    assert {"deallocate_pipeline_outputs", "use_cpu_initialization"}.isdisjoint(required_fields())
    left = {name for name in chosen(family) if required_fields().get(name, True)}
    assert left == PLAIN


def test_a_cpu_has_none():
    assert chosen("qwen3_moe") == {}
    assert required_fields()["deallocate_pipeline_outputs"] is False


def test_what_is_given_wins(cuda):
    architecture = read_architecture(make_config("qwen3"))

    def config(**overrides):
        return transformer_config(architecture, ParallelSizes(), params_dtype=torch.bfloat16, overrides=overrides)

    assert config().bias_activation_fusion
    assert not config(bias_activation_fusion=False).bias_activation_fusion
    assert config(bias_activation_fusion=False).bias_dropout_fusion
    with pytest.raises(UserError, match="apply_rope_fusion is True, but here it must be False"):
        config(apply_rope_fusion=True)
