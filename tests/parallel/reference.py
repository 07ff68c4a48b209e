"""Models of each kind, how they train, and all that one process makes of a batch."""

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
from megarl.algorithms import PolicyObjective
from megarl.quickstart.tiny_models import add_prediction_layers
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions

TEMPERATURE = 0.8
SEED = 5
SEEDS: Mapping[tuple[str, Size], int] = {
    ("qwen3_moe", Size(layers=12, experts=6, heads=8)): 6,
    ("deepseek_v3", Size(layers=12, experts=4, heads=8)): 6,
    ("deepseek_v3", Size(layers=14, experts=6, heads=6)): 6,
}
"""Other seeds of models in which rounding grows: a router of the first would score two experts within 2e-8, and choose
between them by it; gradients of the others differ by 1.4e-5 and 1.1e-5 in one layout, and with other seeds by 5e-6.
"""


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
    torch.manual_seed(SEEDS.get((kind.model_type, size), SEED))
    config = AutoConfig.for_model(kind.model_type, dtype="float32", **size.fields(kind))
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


def options(kind: Kind, sizes: ParallelSizes, *, distributed_optimizer: bool, shared_prefixes: bool) -> MegatronOptions:
    # With this epsilon a step of Adam follows the size of a gradient and not its sign alone, which rounding can change.
    return MegatronOptions(
        sizes,
        torch.float32,
        transformer=kind.megatron,
        optimizer={"lr": 1e-2, "adam_eps": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1},
        distributed={"use_distributed_optimizer": distributed_optimizer},
        shared_prefixes=shared_prefixes,
    )


def open_model(kind: Kind, folder: Path, rank: int, chosen: MegatronOptions) -> MegatronModel:
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(read_architecture(checkpoint.config), chosen, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    return model
