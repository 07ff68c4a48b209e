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
from megarl.rehearsal.alive import Alive
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(1800)]

TOKENS, RANKS = 65_536, 4
LAYERS, HIDDEN, WIDTH, HEADS, HEAD, VOCABULARY = 2, 32, 64, 1, 32, 64
FLOAT = 4
SHORT = TOKENS // 16


def predicted_bytes(tokens: int, ranks: int) -> int:
    """Memory of a train step that grows with its sequence, on each of `ranks` ranks, when its loss is computed.

    A layer keeps for the backward pass what goes into its norms, products and attention, all of this rank's tokens.
    Attention gathers keys and values of the whole sequence; the two chunks of this rank keep those that they look at:
    k and 2 * ranks + 1 - k of the 2 * ranks chunks of the sequence.
    """
    own = tokens // ranks
    norms = 6 * HIDDEN  # two norms, each normalized and scaled, and two sums of the residual
    attention = 12 * HEADS * HEAD  # QKV, two norms, rotated by cosine and sine, the chunks of queries, output twice
    mlp = 5 * WIDTH  # gate and up, the activation, one of its factors, their product
    keys_and_values = 2 * HEADS * HEAD * tokens * (2 * ranks + 1) // (2 * ranks)
    of_layers = LAYERS * (own * (norms + attention + mlp) + keys_and_values)
    of_ends = own * (4 * HIDDEN + 2 * VOCABULARY)  # embedding, last norm and its chosen tokens; logits, exponentials
    of_whole_sequence = tokens * (HEAD + 30)  # rotary angles, and the numbers of a token
    return FLOAT * (of_layers + of_ends + of_whole_sequence)


def peak_growth(rank: int, sizes: ParallelSizes, folder: Path) -> tuple[int, int, float]:
    """Bytes that a train step on the whole sequence needs beyond those of a short one, and its gradient norm.

    Bytes at the peak are of its tensors, exactly, and of the process, which include what operators allocate inside
    and what the allocator keeps.
    """
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(
        read_architecture(checkpoint.config), MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3}), rank
    )
    model.load_huggingface(checkpoint)
    model.prepare_training(2)
    peaks, of_process = [], []
    for length in (SHORT, TOKENS):
        tokens = torch.arange(length) % 61
        batch = RaggedBatch(tokens, torch.tensor([length]), {"weights": torch.full((length,), 1 / length)})
        with Alive(torch.Tensor) as alive:
            result = model.train_step(batch, [[0]], SftObjective())
        peaks.append(alive.peak)
        of_process.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks[1] - peaks[0], of_process[1] - of_process[0], result.gradient_norm


def test_64k_tokens_train_within_the_memory_of_their_part(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
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
    growths, of_processes, norms = zip(*found, strict=True)
    print(f"predicted {predicted}, found {growths}, of processes {of_processes} bytes")
    assert max(growths) < 1.05 * predicted
    assert min(growths) > 0.95 * predicted
    # One matrix of all queries and keys would be 4 GB.
    assert max(of_processes) < 3 * predicted
    assert all(0 < norm < float("inf") for norm in norms)
