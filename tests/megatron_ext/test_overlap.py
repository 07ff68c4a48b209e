"""Communication that overlaps with computation changes no weight, whoever reads it, and whatever the micro-batches."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.distributed import DistributedDataParallel
from parallel_rank import parallel_rank
from safetensors.torch import load_file
from torch import Tensor

from converters.architectures import Lora, read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.cluster.trainer.trainer_worker import TrainerWorker
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.resharding.loader.buckets import cut_into_buckets, views
from megarl.resharding.loader.source import WeightSource
from megarl.resharding.shared_memory import Segment
from megatron_ext.checkpoint import checkpoint
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import AdapterOptions, MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

OFF: Mapping[str, Any] = {}
REDUCE = {"overlap_grad_reduce": True, "bucket_size": 20_000}
GATHER = {**REDUCE, "overlap_param_gather": True}
ALIGNED = {**GATHER, "align_param_gather": True}
LAYOUTS = {
    "DP2": (ParallelSizes(world_size=2), (3, 5, 2, 1, 4, 2), (GATHER,)),
    "PP2 VPP2 DP2 EP2": (
        ParallelSizes(
            world_size=4,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            expert_model_parallel_size=2,
        ),
        (4, 6, 2, 2, 4, 2),
        (ALIGNED,),
    ),
}
BUCKET_BYTES = 1 << 24
LEARNING_RATE = 1e-2
# Weights that are a step behind are off by the learning rate. Gradients are added in another order, which Adam makes
# more of where one is all but zero: up to 1.4e-5, another value on each kind of core.
TOLERANCE = LEARNING_RATE / 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 4})


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reader_finds_the_weights_of_a_run_without_overlap(layout: str, folder: Path, tmp_path: Path) -> None:
    sizes, counts, settings = LAYOUTS[layout]
    for rank, readings in enumerate(run_ranks(of_each, sizes, folder, tmp_path, counts, (OFF, *settings))):
        for fields, found in zip(settings, readings[1:], strict=True):
            assert found.keys() == readings[0].keys()
            for name, expected in readings[0].items():
                worst = float((found[name] - expected).abs().max())
                assert worst <= TOLERANCE, f"{name} of rank {rank} is {worst} off with {fields}"


@pytest.mark.long
def test_adapters_train_as_without_overlap(folder: Path) -> None:
    sizes, counts, _ = LAYOUTS["DP2"]
    for without, *others in run_ranks(adapted, sizes, folder, counts, (OFF, GATHER, ALIGNED)):
        for found in others:
            assert float((found - without).abs().max()) <= TOLERANCE


def adapted(rank: int, sizes: ParallelSizes, folder: Path, counts: tuple[int, ...], settings: tuple) -> list[Tensor]:
    """With each of the `settings` what an adapter in training makes of this rank's tokens, after the last step."""
    found = []
    for distributed in settings:
        model = make_model(rank, sizes, folder, distributed, AdapterOptions(Lora(4, 8.0), seed=7))
        for step, count in enumerate(counts):
            model.train_step(batch_of(step, count), [[i] for i in range(count)], SftObjective())
        found.append(log_probs(model)["log_probs"])
    return found


def test_nobody_gathers_weights_that_are_being_exchanged(tmp_path: Path) -> None:
    """Prediction layers, which log-probs leave out, would wait for nothing that a pass begins to gather."""
    predicting = write_tiny_model("deepseek_v3", tmp_path, fields={"num_nextn_predict_layers": 1})
    assert run_ranks(gathers_left, ParallelSizes(), predicting)[0] == 0


def gathers_left(rank: int, sizes: ParallelSizes, folder: Path) -> int:
    """How many gathers are still under way once the policy is back after the reference's log-probs."""
    model = make_model(rank, sizes, folder, GATHER | {"bucket_size": 2000})
    log_probs(model, reference=True)
    (chunk,) = model.chunks
    assert isinstance(chunk, DistributedDataParallel)
    groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    return sum(each.param_gather_handle is not None for each in groups)


def of_each(
    rank: int, sizes: ParallelSizes, folder: Path, target: Path, counts: tuple[int, ...], settings: tuple
) -> list[dict[str, Tensor]]:
    return [read(rank, sizes, folder, target / str(number), counts, each) for number, each in enumerate(settings)]


def read(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    target: Path,
    counts: tuple[int, ...],
    distributed: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Weights that each reader finds who is the first after a train step of one of `counts` micro-batches."""
    worker = TrainerWorker(rank)
    worker.model = model = make_model(rank, sizes, folder, distributed)
    worker.weights = WeightSource(model.architecture, sizes, rank, model.local_tensors(), "local")
    steps = enumerate(counts)
    readings = {}

    def train() -> None:
        step, count = next(steps)
        result = model.train_step(batch_of(step, count), [[i] for i in range(count)], SftObjective())
        readings[f"norm of step {step}"] = torch.tensor(result.gradient_norm)

    def keep(reader: str, tensors: Mapping[str, Tensor]) -> None:
        readings.update({f"{reader}: {name}": tensor.detach().clone() for name, tensor in tensors.items()})

    train()
    keep("refit", written(worker))
    train()
    if rank == 0:
        (target / "checkpoint").mkdir(parents=True)
    torch.distributed.barrier()
    checkpoint.save(model, target / "checkpoint")
    keep("checkpoint", restored(rank, sizes, folder, target / "checkpoint"))
    train()
    model.export_huggingface(target / "export", folder)
    for file in sorted((target / "export").glob("*.safetensors")):
        keep("export", load_file(file))
    train()
    keep("reference", log_probs(model, reference=True))
    keep("policy after the reference", log_probs(model))
    train()
    model.refresh_reference()
    train()
    keep("policy after two steps", log_probs(model))
    keep("refreshed reference", log_probs(model, reference=True))
    keep("weights", model.local_tensors())
    return readings


def make_model(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    distributed: Mapping[str, Any],
    adapter: AdapterOptions | None = None,
) -> MegatronModel:
    options = MegatronOptions(
        sizes, torch.float32, optimizer={"lr": LEARNING_RATE}, distributed=distributed, adapter=adapter
    )
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.add_adapters()
    model.keep_reference()
    model.prepare_training(10)
    return model


def batch_of(step: int, count: int) -> RaggedBatch:
    """Other sequences on every data-parallel rank, one for each micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + parallel_rank().data)
    lengths = torch.randint(3, 9, (count,), generator=generator)
    tokens = torch.randint(4, 50, (int(lengths.sum()),), generator=generator)
    return RaggedBatch(tokens, lengths, {"weights": torch.full((len(tokens),), 0.1)})


def written(worker: TrainerWorker) -> dict[str, Tensor]:
    """Bytes that this rank writes into the bucket of a refit."""
    dtypes = worker.weight_dtypes()
    shapes = {name: shape for name, shape in worker.model.architecture.hf_shapes.items() if name in dtypes}
    (bucket,) = cut_into_buckets(shapes, dtypes, BUCKET_BYTES, segments=1)
    segment = Segment(BUCKET_BYTES)
    worker.map_segments([segment.handle()], BUCKET_BYTES)
    segment.close()
    worker.write(bucket)
    return {name: tensor.clone() for name, tensor in views(bucket, segment.memory).items()}


def restored(rank: int, sizes: ParallelSizes, folder: Path, saved: Path) -> dict[str, Tensor]:
    model = make_model(rank, sizes, folder, OFF)
    checkpoint.load(model, saved)
    return model.local_tensors()


def log_probs(model: MegatronModel, *, reference: bool = False) -> dict[str, Tensor]:
    batch = batch_of(50, 2)
    with model.reference_weights() if reference else nullcontext():
        predictions = model.log_probs(batch, [[0], [1]], temperature=1.0)
    return {} if predictions is None else {"log_probs": predictions.log_probs}
