"""Gemma-2 against transformers: soft-capped and sliding attention, norms after each block, scaled embeddings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parity import VOCABULARY, gradients, logits, sequences
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.architectures.extensions import Extensions
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.attention.attention import packed_causal_attention
from megatron_ext.model.extensions import check_transformer_engine_suffices

ONE = ParallelSizes()
SIZES = {
    "one": ONE,
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "PP2 VPP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
}


@pytest.fixture(scope="module")
def folder(tiny_models: Mapping[str, Path]) -> Path:
    return tiny_models["gemma2"]


@pytest.fixture(scope="module")
def hf_logits(folder: Path) -> list[Tensor]:
    """Logits of every micro-batch from transformers, one sequence at a time; only its eager attention soft-caps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [torch.cat([model(tokens[None]).logits[0] for tokens in batch]) for batch in sequences()]


@pytest.mark.parametrize("sizes", SIZES)
def test_packed_logits_equal_those_of_transformers(sizes: str, folder: Path, hf_logits: list[Tensor]) -> None:
    assert (
        max(len(tokens) for batch in sequences() for tokens in batch)
        > HuggingFaceCheckpoint(folder).config["sliding_window"]
    )
    results = [(rank, batches) for rank, batches in run_ranks(logits, SIZES[sizes], folder) if batches]
    columns = [batches for _, batches in sorted(results, key=lambda each: each[0])]
    for index, expected in enumerate(hf_logits):
        got = torch.cat([batches[index] for batches in columns], dim=1)[:, :VOCABULARY]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_gradients_of_norms_and_embedding_do_not_depend_on_the_layout(folder: Path) -> None:
    whole = run_ranks(gradients, ONE, folder)[0]
    shares = run_ranks(gradients, SIZES["TP2"], folder)
    for name, expected in whole.items():
        got = torch.stack([share[name] for share in shares]).sum(0)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            got / scale, expected / scale, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("softcap", "window"), [(1.5, None), (None, 3), (1.5, 3), (1.5, 300)])
def test_capped_and_sliding_attention_written_out(softcap: float | None, window: int | None) -> None:
    lengths, heads, groups, width = [1, 9, 2, 140, 9], 4, 2, 8
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(lengths), count, width, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, groups, groups)
    )
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    got = packed_causal_attention(query, key, value, cu_seqlens, softmax_scale=0.7, softcap=softcap, window=window)
    rows = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for row in range(start, stop):
            first = start if window is None else max(start, row - window + 1)
            keys = key[first : row + 1].repeat_interleave(heads // groups, 1)
            values = value[first : row + 1].repeat_interleave(heads // groups, 1)
            scores = 0.7 * (keys * query[row]).sum(-1)
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            rows.append((scores.softmax(0)[..., None] * values).sum(0))
    expected = torch.stack(rows)
    torch.testing.assert_close(got, expected)
    upstream = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    inputs = (query, key, value)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


RELEASED = {
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}


def test_a_released_config_without_the_fields_that_transformers_fills_in() -> None:
    architecture = read_architecture(RELEASED)
    config = architecture.transformer_config
    assert architecture.gpt_model["share_embeddings_and_output_weights"]
    assert architecture.hf_config == RELEASED
    assert architecture.extensions == Extensions(
        embedding_scale=48.0, attention_softcap=50.0, output_softcap=30.0, post_norms=True
    )
    assert config["window_size"] == (4095, 0)
    assert config["window_attn_skip_freq"] == [1, 0] * 13
    assert config["softmax_scale"] == 1 / 16
    value = torch.linspace(-3, 3, 7)
    assert torch.equal(config["activation_func"](value), torch.nn.functional.gelu(value, approximate="tanh"))
    assert len(architecture.hf_shapes) == 26 * 11 + 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "relu"}, "relu"),
        ({"layer_types": ["full_attention"]}, "1 layer_types"),
        ({"layer_types": ["full_attention"] * 25 + ["chunked_attention"]}, "chunked_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
    ],
)
def test_what_megatron_cannot_do_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_architecture({**RELEASED, **fields})


def test_null_turns_soft_capping_off() -> None:
    extensions = read_architecture(
        {**RELEASED, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ).extensions
    assert extensions.attention_softcap is None
    assert extensions.output_softcap is None


def test_transformer_engine_refuses_by_name() -> None:
    with pytest.raises(UserError, match="embedding_scale, attention_softcap, output_softcap, post_norms"):
        check_transformer_engine_suffices(read_architecture(RELEASED).extensions)
    check_transformer_engine_suffices(Extensions())
