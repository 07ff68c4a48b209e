"""Models of each kind, a ragged batch, and all that one process makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from combinations import Kind, Size
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import AGGREGATIONS, PolicyObjective
from megarl.quickstart.tiny_models import add_prediction_layers
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.balance import assign
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import RaggedBatch

LENGTHS = (5, 12, 1, 33, 12, 7, 2, 18, 24, 9, 3, 16, 21, 6, 11, 30, 4, 15, 8, 27)
"""Tokens of each sequence, two or more for each of eight data-parallel ranks."""
PROMPT = 2
TEMPERATURE = 0.8
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Outcome:
    """The results of a train step on the batch."""

    predictions: LogProbs
    loss: float
    gradient_norm: float
    gradients: Mapping[str, Tensor]
    """By HuggingFace name, before the optimizer clips them."""
    weights: Mapping[str, Tensor]
    """By HuggingFace name, after one step of the distributed optimizer."""


def write_model(kind: Kind, size: Size, folder: Path) -> Path:
    """A model in `folder`, no tensor of which is constant."""
    torch.manual_seed(5)
    fields = {**kind.fields, "num_hidden_layers": size.layers}
    if kind.experts:
        fields[kind.experts] = size.experts
    config = AutoConfig.for_model(kind.model_type, dtype="float32", **fields)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.min() == tensor.max():
                tensor += 0.1 * torch.randn(tensor.shape)
    model.save_pretrained(folder)
    if kind.fields.get("num_nextn_predict_layers"):
        add_prediction_layers(folder, std=0.15)
    return folder


def objective() -> PolicyObjective:
    """A loss with a KL, an entropy bonus, and a factor that sees whole responses."""
    correction = CorrectionConfig("sequence_importance", high=1.5)
    return PolicyObjective(AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01, corrections=[correction]))


def bare_batch() -> RaggedBatch:
    """The tokens of the batch, without what the loss needs."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 63, (sum(LENGTHS),), generator=generator)
    return RaggedBatch(tokens, torch.tensor(LENGTHS))


def with_fields(batch: RaggedBatch, log_probs: Tensor) -> RaggedBatch:
    """The batch with policies near `log_probs`, so that some ratios are clipped, and weights of the global batch."""
    generator = torch.Generator().manual_seed(8)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    trained = positions >= PROMPT
    responses = torch.tensor([max(0, length - PROMPT) for length in LENGTHS])
    advantages = torch.randn(len(LENGTHS), generator=generator).repeat_interleave(torch.tensor(LENGTHS))

    def near() -> Tensor:
        return log_probs + 0.3 * torch.randn(log_probs.shape, generator=generator)

    weights = torch.zeros(len(trained)).masked_scatter(trained, AGGREGATIONS["token_mean"](responses))
    return batch.with_fields(
        old_log_probs=near(),
        rollout_log_probs=near(),
        reference_log_probs=near(),
        advantages=advantages,
        weights=weights,
    )


def options(kind: Kind, sizes: ParallelSizes, *, distributed_optimizer: bool) -> MegatronOptions:
    # With this epsilon a step of Adam follows the size of a gradient and not its sign alone, which rounding can change.
    return MegatronOptions(
        sizes,
        torch.float32,
        transformer=kind.megatron,
        optimizer={"lr": 1e-2, "adam_eps": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1},
        distributed={"use_distributed_optimizer": distributed_optimizer},
    )


def micro_batches(sizes: ParallelSizes, multiple: int, data_rank: int) -> list[list[int]]:
    """The sequences of each micro-batch of a data-parallel rank, as the trainer deals them."""
    most = -(-sum(LENGTHS) // (MICRO_BATCHES * sizes.data_parallel_size)) + max(LENGTHS) // 2
    return assign(LENGTHS, sizes.data_parallel_size, max(most, max(LENGTHS)), count_multiple=multiple)[data_rank]


def open_model(kind: Kind, folder: Path, rank: int, chosen: MegatronOptions) -> MegatronModel:
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(read_architecture(checkpoint.config), chosen, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    return model
