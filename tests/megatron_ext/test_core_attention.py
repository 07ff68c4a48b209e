"""The attention that a model gets where a kernel may be missing: on a CPU, with attentions that lack something."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from parity import VOCABULARY, logits, sequences
from small_configs import make_config
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext import device
from megatron_ext.attention import core_attention as choosing
from megatron_ext.attention.core_attention import core_attention, needs_preflight, why_not, with_padded_values
from megatron_ext.attention.packed_attention import PackedAttention
from megatron_ext.model import specs
from megatron_ext.model.model import transformer_config

ONE = ParallelSizes()
KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables by which Transformer Engine is told of kernels that it may use."""


def config(family: str, dtype: torch.dtype = torch.bfloat16):
    architecture = read_architecture(make_config(family))
    return transformer_config(architecture, ONE, params_dtype=dtype, overrides={})


class EqualWidths(PackedAttention):
    """As where cuDNN has no kernel for values narrower than keys."""

    def forward(self, query, key, value, *arguments, **options):
        if value.shape[-1] != key.shape[-1]:
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(query, key, value, *arguments, **options)


class HalfPrecision(PackedAttention):
    """As of kernels for bf16 alone."""

    def forward(self, query, *arguments, **options):
        if query.dtype == torch.float32:
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(query, *arguments, **options)


class OneSequence(PackedAttention):
    """Wrong, without an error: it looks across the bounds of sequences."""

    def forward(self, query, key, value, *arguments, packed_seq_params, **options):
        packed_seq_params.cu_seqlens_q = packed_seq_params.cu_seqlens_q[[0, -1]]
        return super().forward(query, key, value, *arguments, packed_seq_params=packed_seq_params, **options)


class WrongGradient(PackedAttention):
    """Right forward, wrong backward."""

    def forward(self, query, key, value, *arguments, **options):
        return super().forward(query, key.detach() + 0 * key, value, *arguments, **options)


class NoGradient(PackedAttention):
    """Right forward; the gradient of keys is NaN."""

    def forward(self, query, key, value, *arguments, **options):
        return super().forward(query, key + (0 * key).sqrt(), value, *arguments, **options)


class EvaluationOnly(PackedAttention):
    """As where a kernel has no backward pass: there is none for training."""

    def forward(self, *arguments, **options):
        if self.training:
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(*arguments, **options)


class OfFlashAttention(PackedAttention):
    """As where FlashAttention is all that may be used, which takes no values narrower than keys."""

    def forward(self, query, key, value, *arguments, **options):
        kernels = [os.environ.get(name) for name in KERNELS]
        if kernels == ["1", "0", "0"] and value.shape[-1] != key.shape[-1]:
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(query, key, value, *arguments, **options)


class WithoutKernel(PackedAttention):
    """As where cuDNN has no kernel and flash-attn is not installed: all scores are kept, if they may be."""

    def forward(self, *arguments, **options):
        if os.environ["NVTE_UNFUSED_ATTN"] != "1":
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(*arguments, **options)


class WithFlashAttention(PackedAttention):
    """As where cuDNN has no kernel and flash-attn is installed."""

    def forward(self, *arguments, **options):
        if "1" not in (os.environ["NVTE_FLASH_ATTN"], os.environ["NVTE_UNFUSED_ATTN"]):
            raise ValueError("No dot product attention backend is available for the provided inputs")
        return super().forward(*arguments, **options)


@pytest.fixture
def kernels(monkeypatch):
    """Variables of kernels, unset, and as they were when the test ends."""
    for name in KERNELS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("backend", "chosen"),
    [("flash", "PaddedValuesOfFlashAttention"), ("fused", "OfFlashAttention"), ("auto", "OfFlashAttention")],
)
def test_the_pass_is_made_with_the_kernels_that_the_configuration_chooses(backend, chosen):
    with_backend = replace(config("deepseek_v3"), attention_backend=AttnBackend[backend])
    assert core_attention(OfFlashAttention, with_backend).__name__ == chosen
    expected = {"flash": ["1", "0", "0"], "fused": ["0", "1", "0"], "auto": ["1", "1", "1"]}
    assert [os.environ[name] for name in KERNELS] == expected[backend]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_an_attention_that_is_right_is_taken(family, dtype, caplog):
    assert core_attention(PackedAttention, config(family, dtype)) is PackedAttention
    assert not caplog.records


def test_dropout_of_training_does_not_make_an_attention_wrong():
    with_dropout = replace(config("deepseek_v3"), attention_dropout=0.5)
    assert core_attention(PackedAttention, with_dropout) is PackedAttention


def test_values_are_padded_where_widths_have_to_be_equal(caplog):
    chosen = core_attention(EqualWidths, config("deepseek_v3"))
    assert chosen.__mro__[1:] == with_padded_values(EqualWidths).__mro__[1:]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "EqualWidths cannot: ValueError: No dot product attention backend" in record.getMessage()


@pytest.mark.parametrize(
    ("core", "family", "dtype"),
    [
        (HalfPrecision, "qwen3", torch.float32),
        (OneSequence, "qwen3", torch.float32),
        (OneSequence, "deepseek_v3", torch.bfloat16),
        (WrongGradient, "deepseek_v3", torch.float32),
        (NoGradient, "qwen3", torch.float32),
        (EvaluationOnly, "deepseek_v3", torch.bfloat16),
    ],
)
def test_plain_torch_computes_what_nothing_else_does_right(core, family, dtype):
    assert core_attention(core, config(family, dtype)) is PackedAttention


def test_what_is_wrong_is_told_by_its_distance():
    assert why_not(OneSequence, config("qwen3")).endswith("away from that of plain torch")


def test_no_attention_at_all_is_one_sentence(monkeypatch):
    monkeypatch.setattr(choosing, "why_not", lambda *_: "it is not there")
    with pytest.raises(UserError, match="no attention computes the packed sequences"):
        core_attention(PackedAttention, config("qwen3"))


def test_a_pass_is_made_only_where_a_kernel_may_be_missing():
    assert needs_preflight(config("deepseek_v3"))
    assert needs_preflight(config("qwen3", torch.float32))
    assert not needs_preflight(config("qwen3"))


@pytest.mark.parametrize(
    ("capability", "fields", "needed"),
    [
        ((8, 0), {}, True),
        ((8, 9), {}, True),
        ((9, 0), {}, False),
        ((9, 0), {"deterministic_mode": True}, False),
        ((9, 0), {"kv_channels": 256}, False),
        ((9, 0), {"kv_channels": 512}, True),
        ((10, 0), {}, False),
        ((10, 3), {"kv_channels": 128}, False),
        ((10, 0), {"kv_channels": 256}, True),
        ((10, 0), {"deterministic_mode": True}, True),
        ((12, 0), {}, True),
        ((12, 1), {}, False),
    ],
)
def test_on_some_gpus_a_kernel_may_be_missing(capability, fields, needed, monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    assert needs_preflight(replace(config("qwen3"), **fields)) is needed


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("core", "family", "backend", "chosen"),
    [
        (WithoutKernel, "qwen3", "auto", "PackedAttention"),
        (WithoutKernel, "deepseek_v3", "auto", "PackedAttention"),
        (WithoutKernel, "qwen3", "fused", "PackedAttention"),
        (WithoutKernel, "qwen3", "unfused", "WithoutKernel"),
        (WithFlashAttention, "qwen3", "auto", "WithFlashAttention"),
    ],
)
def test_scores_are_not_kept_for_want_of_a_kernel(core, family, backend, chosen, monkeypatch, caplog):
    monkeypatch.setattr(device, "compute_capability", lambda: (8, 0))
    of_model = replace(config(family), attention_backend=AttnBackend[backend])
    block = specs.get_gpt_decoder_block_spec(of_model, use_transformer_engine=False, pp_rank=0)
    layers = [specs._with_core(layer, core) for layer in block.layer_specs]
    layers = specs._with_working_attention(layers, of_model)
    assert {layer.submodules.self_attention.submodules.core_attention.__name__ for layer in layers} == {chosen}
    assert os.environ["NVTE_UNFUSED_ATTN"] == str(int(backend in ("auto", "unfused")))
    assert [f"attention is computed by {chosen}" in each for each in caplog.messages] == [True] * (
        core.__name__ != chosen
    )


def test_a_model_with_padded_values_is_the_same_model(tiny_models: dict[str, Path], monkeypatch):
    folder = tiny_models["deepseek_v3"]
    monkeypatch.setitem(specs._ATTENTION_MODULES, "core_attention", with_padded_values(EqualWidths))
    ((_, batches),) = run_ranks(logits, ONE, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for got, tokens_of in zip(batches, sequences(), strict=True):
            expected = torch.cat([model(tokens[None]).logits[0] for tokens in tokens_of])
            torch.testing.assert_close(got[:, :VOCABULARY], expected, atol=1e-4, rtol=0)


def test_every_layer_gets_the_attention_that_works(monkeypatch):
    of_model = config("deepseek_v3")
    block = specs.get_gpt_decoder_block_spec(of_model, use_transformer_engine=False, pp_rank=0)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = EqualWidths
    layers = specs._with_working_attention(block.layer_specs, of_model)
    cores = [layer.submodules.self_attention.submodules.core_attention for layer in layers]
    assert [core.__name__ for core in cores] == ["PaddedValuesEqualWidths"] * of_model.num_layers
    assert all(isinstance(layer, ModuleSpec) for layer in layers)
    shared = [layer.submodules.self_attention for layer in specs._with_mergeable_attention(layers)]
    assert {each.submodules.core_attention for each in shared} == {PackedAttention}
