"""A rehearsed rank needs what a real one needs in a whole train step of several micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_in_turn
from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rehearsal.activations import MicroBatchSize
from megarl.rehearsal.alive import Alive
from megarl.rehearsal.own_process import OwnProcesses
from megarl.rehearsal.trainer_rank import RankModel, RehearsedRank
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.optimizer.fully_sharded import gradients
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

SIZE, MICRO_BATCHES = MicroBatchSize(tokens=512, longest=384), 4
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS = ParallelSizes(2, use_torch_fsdp2=True)
STAGES = ParallelSizes(2, pipeline_model_parallel_size=2)
CASES = [(ROWS, {}), (ROWS, FULL), (STAGES, {}), (STAGES, FULL)]


class Passes(MegatronModel):
    """Notes what is alive before the first pass of a step and at the end of the last, and the peak between them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.alive = Alive(Tensor)

    def _packed_micro_batches(self, *arguments: Any, **options: Any) -> Any:
        self.before = self.alive.peak = self.alive.nbytes
        return super()._packed_micro_batches(*arguments, **options)

    def _step_optimizer(self) -> float:
        # Gradients are in Megatron's buffers or, with FSDP2, made in the step.
        made = gradients(self.chunks) if self.options.parallel.use_torch_fsdp2 else ()
        self.needed = self.alive.peak - self.before - sum(each.nbytes for each in made)
        return super()._step_optimizer()


def needed(rank: int, _sizes: ParallelSizes, folder: Path, options: MegatronOptions) -> int:
    """Bytes of activations, and of what is gathered, in the second train step."""
    model = Passes(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(2)
    lengths = SIZE.lengths() * MICRO_BATCHES
    numbers = list(range(len(lengths)))
    micro_batches = [numbers[start : start + 2] for start in numbers[::2]]
    weights = torch.full((sum(lengths),), 1 / sum(lengths))
    batch = RaggedBatch(4 + torch.arange(sum(lengths)) % 40, torch.tensor(lengths), {"weights": weights})
    with model.alive:
        for _ in range(2):
            model.train_step(batch, micro_batches, SftObjective())
    return model.needed


@pytest.mark.long
def test_a_train_step_needs_what_is_rehearsed(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3", tmp_path, fields={"num_hidden_layers": 4})
    every = [
        (sizes, MegatronOptions(sizes, torch.bfloat16, optimizer={"lr": 1e-3}, transformer=recomputed))
        for sizes, recomputed in CASES
    ]
    found = run_in_turn([(needed, sizes, folder, options) for sizes, options in every])
    for (sizes, options), of_ranks in zip(every, found, strict=True):
        model = RankModel("trainer", read_json(folder / CONFIG), options)
        function = "megarl.rehearsal.trainer_rank", "rehearse_ranks"
        rehearsed: list[RehearsedRank] = OwnProcesses().call(*function, model, range(2), SIZE)
        for rank, (each, real) in enumerate(zip(rehearsed, of_ranks, strict=True)):
            assert each.activations is not None
            counted = each.activations.of_stage(sizes, sizes.coordinates(rank).pipeline)
            assert counted == pytest.approx(real, rel=0.02), (sizes, options.transformer, rank)
