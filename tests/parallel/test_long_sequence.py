"""A sequence of 64k tokens trains on four ranks, each within the memory that its part of the layout needs."""

import resource
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(1800)]

TOKENS, RANKS = 65_536, 4
LAYERS, HIDDEN, WIDTH, HEADS, HEAD = 2, 32, 64, 1, 32
FLOAT = 4
SHORT = TOKENS // 16


def predicted_bytes(tokens: int, ranks: int) -> int:
    """Memory of a train step that grows with its sequence, on each of `ranks` ranks.

    A layer keeps for the backward pass what goes into its norms, products and attention, all of this rank's tokens.
    Attention gathers keys and values of the whole sequence and puts them into its order: both are kept, and in the
    layer that is computed just now there are their gradients beside them.
    """
    own = tokens // ranks
    attention = 4 * HEADS * HEAD  # query, key, value and output
    layer = 4 * HIDDEN + 2 * attention + 4 * WIDTH  # two norms in and out, rotated once, gate, up, their product
    whole = 2 * HEADS * HEAD
    of_layers = LAYERS * (own * layer + tokens * 2 * whole)
    of_layers += LAYERS * tokens * 5  # two indices of long and a mask, by which attention finds its keys
    at_once = own * (2 * layer) + tokens * 4 * whole
    at_once += tokens * (3 * HEAD + 20)  # rotary angles with cosine and sine, and the numbers of a token
    return FLOAT * (of_layers + at_once)


def peak_growth(rank: int, sizes: ParallelSizes, folder: Path) -> tuple[int, float]:
    """Bytes by which a train step on the whole sequence raises the peak of a short one, and its gradient norm."""
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(
        read_architecture(checkpoint.config), MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3}), rank
    )
    model.load_huggingface(checkpoint)
    model.prepare_training(2)
    peaks = []
    for length in (SHORT, TOKENS):
        tokens = torch.arange(length) % 61
        batch = RaggedBatch(tokens, torch.tensor([length]), {"weights": torch.full((length,), 1 / length)})
        result = model.train_step(batch, [[0]], SftObjective())
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks[1] - peaks[0], result.gradient_norm


def test_64k_tokens_train_within_the_memory_of_their_part(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=TOKENS,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    sizes = ParallelSizes(world_size=RANKS, context_parallel_size=RANKS)
    found = run_ranks(peak_growth, sizes, tmp_path, timeout_s=1500)
    predicted = predicted_bytes(TOKENS, RANKS) - predicted_bytes(SHORT, RANKS)
    growths = [growth for growth, _ in found]
    print(f"predicted {predicted / 1e6:.0f} MB, found {[round(each / 1e6) for each in growths]} MB")
    # Peaks are of whole processes: allocators keep some of what is freed.
    assert 0.6 * predicted < min(growths)
    assert max(growths) < 1.3 * predicted
    assert max(growths) < 0.6 * (predicted_bytes(TOKENS, 1) - predicted_bytes(SHORT, 1))
    assert all(0 < norm < float("inf") for _, norm in found)
