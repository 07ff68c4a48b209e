"""The cost of a sequence, beside the operations that transformers' models make."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from converters.architectures import Lora, read_architecture
from converters.cost.compute import PassFlops, forward_flops, update_flops
from converters.formats.safetensors import CONFIG, read_json
from megarl.quickstart.tiny_models import write_tiny_model

TOKENS = 96


# A vocabulary that counts, in an output layer of its own or in the embedding's.
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_operations_are_those_that_a_model_makes(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path / name)
    # The counter knows neither of attention nor of experts in one operation.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    model.resize_token_embeddings(2000)
    model.config.save_pretrained(folder)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(4, 4 + TOKENS)[None] % 60, use_cache=False)
    attention, rest = 0, 0
    for operation, count in counter.get_flop_counts()["Global"].items():
        if "bmm" in str(operation):
            attention += count // 2  # a mask hides half of the pairs
        else:
            rest += count
    counted = forward_flops(read_architecture(read_json(folder / CONFIG)))
    assert counted == pytest.approx(PassFlops(rest / TOKENS, attention / TOKENS**2), rel=0.03)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_hidden_layers": 2}


def test_operations_counted_by_hand(tmp_path: Path) -> None:
    """Two layers: attention of 4 heads and 2 groups of width 16, then 8 experts of which 2 take a token."""
    folder = write_tiny_model("qwen3_moe", tmp_path, fields=SIZES | EXPERTS | {"tie_word_embeddings": False})
    attention = 64 * (64 + 32 + 32) + 64 * 64
    router, of_experts = 64 * 8, 2 * 3 * 64 * 48
    config = read_json(folder / CONFIG)
    output = 64 * config["vocab_size"]
    assert forward_flops(read_architecture(config)) == (
        2 * (2 * (attention + router + of_experts) + output),
        2 * 4 * 32,
    )


def test_an_adapter_leaves_out_the_gradients_of_frozen_weights(tmp_path: Path) -> None:
    """Adapters of rank 3 beside the query, and beside one matrix of each of the 2 of 8 experts that a token meets."""
    folder = write_tiny_model("qwen3_moe", tmp_path, fields=SIZES | EXPERTS)
    architecture, lora = read_architecture(read_json(folder / CONFIG)), Lora(3, 6.0, ("q_proj", "down_proj"))
    model = forward_flops(architecture)
    adapters = 2 * (3 * (64 + 64) + 2 * 3 * (48 + 64))
    assert forward_flops(architecture, lora) == (model.per_token + 2 * adapters, model.per_square)
    assert update_flops(architecture) == (3 * model.per_token, 3 * model.per_square)
    trained = 2 * model.per_token + 3 * 2 * adapters
    assert update_flops(architecture, lora) == (trained, 3 * model.per_square)


@pytest.mark.parametrize("detached", [False, True])
def test_prediction_layers_run_in_updates_where_they_train(detached: bool, tmp_path: Path) -> None:
    """Each is a projection of twice the width, one more layer of the model's last kind, and the output layer again."""
    fields = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    alone, with_them = (
        read_architecture(
            read_json(
                write_tiny_model("deepseek_v3", tmp_path / name, fields={**fields, "num_nextn_predict_layers": layers})
                / CONFIG
            )
        )
        for name, layers in (("alone", 0), ("with them", 2))
    )
    one_fewer = read_architecture(
        read_json(
            write_tiny_model("deepseek_v3", tmp_path / "shorter", fields={**fields, "num_hidden_layers": 2}) / CONFIG
        )
    )
    forward, shorter = forward_flops(alone), forward_flops(one_fewer)
    assert forward_flops(with_them) == forward
    assert update_flops(with_them) == update_flops(alone)
    layer = forward.per_token - shorter.per_token, forward.per_square - shorter.per_square
    hidden, vocabulary = alone.transformer_config["hidden_size"], alone.gpt_model["vocab_size"]
    projection, output = 2 * 2 * hidden * hidden, 2 * hidden * vocabulary
    trained = 3 * (forward.per_token + 2 * (layer[0] + projection)) + (2 if detached else 3) * 2 * output
    found = update_flops(with_them, prediction_layers=True, detached=detached)
    assert found == pytest.approx((trained, 3 * (forward.per_square + 2 * layer[1])))
