"""The model is the same model under every parallel size: logits against transformers, gradients against one rank."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parity import VOCABULARY, gradients, logits, of_each, sequences
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.model.model import build_model, transformer_config

ONE = ParallelSizes()
TP2 = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
VPP2 = ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
EP2 = ParallelSizes(world_size=2, expert_model_parallel_size=2)
ETP1 = ParallelSizes(world_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
EP2_ETP2 = ParallelSizes(world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2)

TP4 = ParallelSizes(world_size=4, tensor_model_parallel_size=4, expert_tensor_parallel_size=1)
TP8 = ParallelSizes(world_size=8, tensor_model_parallel_size=8)
PP3 = ParallelSizes(world_size=3, pipeline_model_parallel_size=3)

DENSE, MOE = ("llama", "qwen2", "qwen3"), ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
# All other layouts are those of `make test-parallel`.
LOGITS = {
    **dict.fromkeys(("ONE", "TP2", "VPP2"), (*DENSE, *MOE)),
    **dict.fromkeys(("EP2", "EP2_ETP2"), MOE),
    # Four ranks for two or for one key-value head.
    "TP4": ("llama", "qwen2", "mixtral", "glm4_moe"),
}
GRADIENTS = {
    "TP2": ("qwen2", "deepseek_v3"),
    "VPP2": ("qwen3",),
    "EP2": ("mixtral", "glm4_moe"),
}
TOLERANCE = {**dict.fromkeys(DENSE, 1e-5), **dict.fromkeys(MOE, 1e-4)}

Ranks = list[dict[str, Any]]


def cases(names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, sizes) for sizes in names for name in names[sizes]]


@pytest.fixture(scope="module")
def hf_logits(tiny_models: Mapping[str, Path]) -> Mapping[str, list[Tensor]]:
    """Logits of every micro-batch from transformers, one sequence at a time."""
    expected = {}
    for name in (*DENSE, *MOE):
        model = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.float32).eval()
        with torch.no_grad():
            expected[name] = [torch.cat([model(tokens[None]).logits[0] for tokens in batch]) for batch in sequences()]
    return expected


@pytest.fixture(scope="module")
def run_each(tiny_models: Mapping[str, Path]) -> Callable[..., Ranks]:
    """`run_each(function, sizes, names)`: by rank, what `function` gives for each model; launched once."""

    @cache
    def run(function: Callable[..., Any], sizes: str, names: tuple[str, ...]) -> Ranks:
        return run_ranks(of_each, globals()[sizes], function, {name: tiny_models[name] for name in names})

    return run


@pytest.fixture(scope="module")
def one_rank_gradients(run_each: Callable[..., Ranks]) -> Mapping[str, dict[str, Tensor]]:
    names = {"qwen3_moe", *(name for names in GRADIENTS.values() for name in names)}
    return run_each(gradients, "ONE", tuple(sorted(names)))[0]


@pytest.mark.parametrize(("name", "sizes"), cases(LOGITS))
def test_logits_equal_those_of_transformers(
    name: str, sizes: str, run_each: Callable[..., Ranks], hf_logits: Mapping[str, list[Tensor]]
) -> None:
    parallel: ParallelSizes = globals()[sizes]
    ranks = [results[name] for results in run_each(logits, sizes, LOGITS[sizes])]
    results = [(rank, batches) for rank, batches in ranks if batches]
    tensor_ranks = parallel.tensor_model_parallel_size
    assert len(results) == parallel.world_size // parallel.pipeline_model_parallel_size
    for start in range(0, len(results), tensor_ranks):
        columns = [batches for _, batches in sorted(results[start : start + tensor_ranks], key=lambda each: each[0])]
        for index, expected in enumerate(hf_logits[name]):
            got = torch.cat([batches[index] for batches in columns], dim=1)
            torch.testing.assert_close(got[:, :VOCABULARY], expected, atol=TOLERANCE[name], rtol=0)


@pytest.mark.parametrize(("name", "sizes"), cases(GRADIENTS))
def test_gradients_equal_those_of_one_rank(
    name: str,
    sizes: str,
    run_each: Callable[..., Ranks],
    one_rank_gradients: Mapping[str, dict[str, Tensor]],
) -> None:
    shares = [results[name] for results in run_each(gradients, sizes, GRADIENTS[sizes])]
    assert_same_gradients(shares, one_rank_gradients[name])


def test_experts_without_tensor_parallelism_get_their_whole_gradient(
    tiny_models: Mapping[str, Path], one_rank_gradients: Mapping[str, dict[str, Tensor]]
) -> None:
    shares = run_ranks(gradients, ETP1, tiny_models["qwen3_moe"])
    assert_same_gradients(shares, one_rank_gradients["qwen3_moe"])


def test_experts_get_different_numbers_of_tokens_by_allgather(
    tiny_models: Mapping[str, Path], one_rank_gradients: Mapping[str, dict[str, Tensor]]
) -> None:
    by_allgather = {"moe_token_dispatcher_type": "allgather"}
    shares = run_ranks(gradients, EP2, tiny_models["qwen3_moe"], by_allgather)
    assert_same_gradients(shares, one_rank_gradients["qwen3_moe"])


def assert_same_gradients(shares: list[dict[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    for name, whole in expected.items():
        scale = max(1.0, float(whole.abs().max()))
        got = torch.stack([share[name] for share in shares]).sum(0)
        torch.testing.assert_close(
            got / scale, whole / scale, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"no_such_field": 1}, "no_such_field"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2, but here it must be 1"),
        ({"hybrid_context_parallel": True}, "the same context_parallel_size ranks"),
        ({"tp_comm_overlap": True}, "user buffers"),
        ({"attention_dropout": 0.25}, "attention_dropout=0.25 is not what config.json of this qwen3 model says"),
        ({"fp8": "e4m3"}, "fp8=e4m3 needs the modules of Transformer Engine"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "cpu_offloading=True needs the modules of"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"deallocate_pipeline_outputs": True}, "deallocate_pipeline_outputs"),
        ({"recompute_granularity": "all"}, "recompute_granularity"),
    ],
)
def test_fields_that_cannot_be_set_are_named(overrides: dict, words: str, tiny_models: Mapping[str, Path]) -> None:
    architecture = read_architecture(HuggingFaceCheckpoint(tiny_models["qwen3"]).config)
    with pytest.raises(UserError, match=words):
        transformer_config(architecture, ONE, params_dtype=torch.float32, overrides=overrides)


@pytest.mark.parametrize(("sizes", "words"), [("EP2", "experts"), ("TP8", "num_attention_heads"), ("PP3", "layers")])
def test_sizes_that_do_not_divide_are_named(sizes: str, words: str, tiny_models: Mapping[str, Path]) -> None:
    architecture = read_architecture(HuggingFaceCheckpoint(tiny_models["qwen3"]).config)
    with pytest.raises(UserError, match=words):
        build_model(architecture, globals()[sizes], params_dtype=torch.float32)


def test_overrides_reach_the_configuration(tiny_models: Mapping[str, Path]) -> None:
    architecture = read_architecture(HuggingFaceCheckpoint(tiny_models["qwen3"]).config)
    config = transformer_config(
        architecture,
        ONE,
        params_dtype=torch.bfloat16,
        overrides={"attention_softmax_in_fp32": True, "hidden_dropout": 0.0},
    )
    assert config.attention_softmax_in_fp32
    assert config.bf16
    assert config.pipeline_dtype is torch.bfloat16
