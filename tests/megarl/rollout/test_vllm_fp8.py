"""Weights of engines in number formats: their own layers and loaders, refits by name and straight into parameters."""

import pytest
import torch
from engine_host import GREEDY, PROMPTS, Served, Weights
from safetensors.torch import load_file, save_file

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8, NVFP4
from megarl.quickstart.tiny_models import IN_BLOCKS, write_tiny_model
from megarl.resharding.direct.quantised_shard import CutBlocksError
from megarl.rollout import engine_kind
from megarl.rollout.protocol import Request

CUT_IN_TWO = {**IN_BLOCKS["qwen3_moe"], "num_key_value_heads": 8, "moe_intermediate_size": 256}
"""With which each half of a matrix is in whole blocks, too."""
LONG_IN_SGLANG = (pytest.mark.sglang, pytest.mark.long)
SHARED_OUT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
ENGINES = [
    # But for its experts as Qwen3, of which `tests/megarl/refit/test_refit.py` has a whole run.
    ("vllm", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], FP8_BLOCK),
    pytest.param("vllm", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], FP8_BLOCK_UE8M0, marks=pytest.mark.long),
    ("vllm", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], INT8_CHANNEL),
    pytest.param("vllm", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], MXFP8, marks=pytest.mark.long),
    ("vllm", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], NVFP4),
    pytest.param("vllm", SHARED_OUT, "qwen3_moe", IN_BLOCKS["qwen3_moe"], NVFP4, marks=pytest.mark.long),
    pytest.param("vllm", {}, "deepseek_v3", IN_BLOCKS["deepseek_v3"], NVFP4, marks=pytest.mark.long),
    pytest.param("vllm", {}, "deepseek_v3", IN_BLOCKS["deepseek_v3"], FP8_BLOCK, marks=pytest.mark.long),
    pytest.param("sglang", {"load_format": "dummy"}, "qwen3", IN_BLOCKS["qwen3"], FP8_BLOCK, marks=pytest.mark.sglang),
    pytest.param("sglang", {"tp_size": 2}, "qwen3_moe", CUT_IN_TWO, FP8_BLOCK, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {}, "qwen3_moe", IN_BLOCKS["qwen3_moe"], FP8_BLOCK_UE8M0, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {}, "deepseek_v3", IN_BLOCKS["deepseek_v3"], FP8_BLOCK, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {"load_format": "dummy"}, "qwen3", {}, INT8_CHANNEL, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {}, "qwen3_moe", {}, INT8_CHANNEL, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {"tp_size": 2}, "qwen3_moe", {}, INT8_CHANNEL, marks=LONG_IN_SGLANG),
    pytest.param("sglang", {}, "deepseek_v3", {}, INT8_CHANNEL, marks=LONG_IN_SGLANG),
]


@pytest.fixture
def block_folders(tmp_path):
    """Makes two models of a family, in float32, and each with the weights that its codes in a format stand for."""

    def make(name, fields, number_format):
        folders = [write_tiny_model(name, tmp_path / str(seed), seed=seed, fields=fields) for seed in (0, 1)]
        return [(folder, rounded(folder, number_format)) for folder in folders]

    return make


def rounded(folder, number_format):
    """A copy of a model whose quantised matrices are what transformers would decode from their codes."""
    copy = folder.parent / f"{folder.name}_rounded"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for name in number_format.quantised_names(read_architecture(read_json(folder / CONFIG))):
        weights[name] = number_format.dequantise(*number_format.quantise(weights[name]), torch.float32)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize(("kind", "arguments", "name", "fields", "number_format"), ENGINES)
def test_greedy_equals_huggingface_with_the_decoded_weights(
    host, block_folders, make_trainer, assert_greedy, kind, arguments, name, fields, number_format
):
    (first, first_rounded), (second, second_rounded) = block_folders(name, fields, number_format)
    in_blocks = engine_kind(kind).quantised(arguments, number_format, read_architecture(read_json(first / CONFIG)))
    served = Served(host.start(first, **in_blocks), (first, second), number_format)
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]

    def check(folder):
        for prompt, (generation,) in zip(PROMPTS, served.engine.generate(requests), strict=True):
            assert_greedy(folder, prompt, generation)

    # As the engine has read it: a checkpoint in float32.
    if "load_format" not in arguments:
        check(first_rounded)
    served.update(served.second, 1)
    check(second_rounded)
    # Values, of which the worker makes codes.
    served.update(Weights(first, number_format, as_values=served.first.names), 2)
    check(first_rounded)
    if number_format.elements_per_code > 1:
        # With codes that share a byte it has its own loader alone.
        return
    if number_format is INT8_CHANNEL and arguments.get("tp_size", 1) > 1:
        with pytest.raises(CutBlocksError, match="through its blocks"):
            make_trainer(served.engine, first, number_format)
        return

    # Straight into the parameters, byte for byte what the engine's own loader has put there.
    trainer = make_trainer(served.engine, first, number_format)
    assert [trace.untraced for trace in trainer.spec.traces] == [{}] * arguments.get("tp_size", 1)
    trainer.connect()
    trainer.load(first)
    assert trainer.compare(3) == set()
    trainer.load(second)
    assert any(found.endswith(number_format.scales_suffix) for found in trainer.compare(4))
    trainer.update(5)
    check(second_rounded)
    served.update(served.first, 6)
    check(first_rounded)
    trainer.update(7)
    check(second_rounded)
    # As between machines, too.
    for version, (transport, weights, expected) in enumerate(
        [("rdma", first, first_rounded), ("tcp", second, second_rounded)], start=8
    ):
        trainer.connect(transport=transport)
        trainer.load(weights)
        trainer.update(version)
        check(expected)
