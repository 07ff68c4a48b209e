"""A run continued from a checkpoint is the run that was not interrupted: bit for bit at the layout it was saved at.

At another layout, with other ranks, and with the other kind of optimizer, its losses are the same but for rounding.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import run_in_turn

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.packing.balance import assign
from megatron_ext.packing.packing import RaggedBatch

STEPS = 4
SAVED_AFTER = 2
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Setup:
    """How a run is cut, and the options of its optimizer."""

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    options: Mapping[str, Any] = field(default_factory=dict)


TP2 = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
EP2 = ParallelSizes(world_size=2, expert_model_parallel_size=2)
PP2 = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
TP2_EP2 = ParallelSizes(
    world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
)
VPP2 = ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
DP2 = ParallelSizes(world_size=2)
CP2 = ParallelSizes(world_size=2, context_parallel_size=2)
FSDP2 = ParallelSizes(world_size=2, use_torch_fsdp2=True)
PLAIN = {"distributed": {"use_distributed_optimizer": False}}
SGD = {"optimizer": {"optimizer": "sgd", "lr": 1e-1}, **PLAIN}
SETUPS = {
    "one rank": Setup(),
    "TP2": Setup(TP2),
    "PP2": Setup(PP2),
    "VPP2": Setup(VPP2),
    "EP2": Setup(EP2),
    "TP2 EP2": Setup(TP2_EP2),
    "DP2": Setup(DP2),
    "CP2": Setup(CP2),
    "DP2 plain": Setup(DP2, PLAIN),
    "FSDP2": Setup(FSDP2),
    "DP2 SGD": Setup(DP2, SGD),
    "one rank SGD": Setup(options=SGD),
}
SAME = ["one rank", "TP2", "EP2", "DP2", "CP2", "FSDP2"]
OTHER = [
    ("EP2", "one rank"),
    ("DP2 SGD", "one rank SGD"),
    ("TP2", "PP2"),
    ("TP2 EP2", "DP2 plain"),
    ("CP2", "one rank"),
    ("FSDP2", "one rank"),
    ("TP2", "FSDP2"),
]
"""Layout that is saved at -> layout that the run goes on at."""
FURTHER_SAME = ["PP2", "DP2 plain"]
FURTHER_OTHER = [
    ("TP2", "one rank"),
    ("DP2", "one rank"),
    ("one rank", "DP2"),
    ("DP2 plain", "DP2"),
    ("VPP2", "TP2"),
    ("CP2", "TP2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Runs:
    """Outcomes of all ranks: of the runs that were not interrupted, and of those that went on."""

    whole: Mapping[str, list[dict]]
    continued: Mapping[tuple[str, str], list[dict]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"), layers=2)
    return run_all(SAME, OTHER, folder, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def further_runs(folder, tmp_path_factory):
    return run_all(FURTHER_SAME, FURTHER_OTHER, folder, tmp_path_factory.mktemp("checkpoints"))


def run_all(same, other, folder, root):
    def save(name):
        return (train_and_save, SETUPS[name].sizes, folder, root / name, SETUPS[name].options)

    def load(pair):
        source, target = pair
        return (load_and_train, SETUPS[target].sizes, folder, root / source, SETUPS[target].options)

    def on_one(name):
        return SETUPS[name].sizes.world_size == 1

    pairs = [*((name, name) for name in same), *other]
    names = sorted({name for name, _ in pairs})
    alone, together = [name for name in names if on_one(name)], [name for name in names if not on_one(name)]
    to_one, to_two = [pair for pair in pairs if on_one(pair[1])], [pair for pair in pairs if not on_one(pair[1])]
    first = run_in_turn([save(name) for name in alone])
    second = run_in_turn([*map(save, together), *map(load, to_two)])
    third = run_in_turn([load(pair) for pair in to_one])
    whole = dict(zip([*alone, *together], [*first, *second], strict=False))
    continued = dict(zip([*to_two, *to_one], [*second[len(together) :], *third], strict=True))
    return Runs(whole, continued)


@pytest.mark.parametrize("name", SAME)
def test_continued_run_is_the_uninterrupted_one(name, runs):
    assert_continued(name, runs)


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER_SAME)
def test_continued_run_is_the_uninterrupted_one_at_further_layouts(name, further_runs):
    assert_continued(name, further_runs)


def assert_continued(name, runs):
    for whole, continued in zip(runs.whole[name], runs.continued[name, name], strict=True):
        assert whole["norms"][SAVED_AFTER:] == continued["norms"]
        assert whole["losses"][SAVED_AFTER:] == continued["losses"]
        assert whole["rates"][SAVED_AFTER:] == continued["rates"]
        assert whole["random"] == continued["random"]
        for tensor_name, tensor in whole["weights"].items():
            assert torch.equal(tensor, continued["weights"][tensor_name]), tensor_name


@pytest.mark.parametrize("pair", OTHER, ids=" -> ".join)
def test_a_run_goes_on_at_another_layout(pair, runs):
    assert_goes_on(pair, runs)


@pytest.mark.long
@pytest.mark.parametrize("pair", FURTHER_OTHER, ids=" -> ".join)
def test_a_run_goes_on_at_further_layouts(pair, further_runs):
    assert_goes_on(pair, further_runs)


def assert_goes_on(pair, runs):
    whole, continued = runs.whole[pair[0]][0], runs.continued[pair][0]
    assert continued["losses"] == pytest.approx(whole["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
    assert continued["norms"] == pytest.approx(whole["norms"][SAVED_AFTER:], rel=1e-4)
    assert continued["rates"] == whole["rates"][SAVED_AFTER:]


def write_model(folder: Path, layers: int = 4) -> Path:
    # Tied embeddings lie on two pipeline stages, and tensor parallelism pads a vocabulary of 63.
    fields = {"num_hidden_layers": layers, "vocab_size": 63, "tie_word_embeddings": True}
    return write_tiny_model("qwen3_moe", folder, fields=fields)


def make_model(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    rate: float = 1.0,
    *,
    head: str = "language_model",
    reference: bool = False,
    dtype: torch.dtype = torch.float32,
    optimizer: Mapping[str, Any] | None = None,
    distributed: Mapping[str, Any] | None = None,
    layers: int | None = None,
):
    from megatron_ext.megatron_model import MegatronModel
    from megatron_ext.options.options import MegatronOptions

    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes,
        dtype,
        optimizer={"lr": 1e-2 * rate, "min_lr": 1e-3 * rate, "weight_decay": 0.1, **(optimizer or {})},
        scheduler={"lr_decay_style": "linear", "lr_warmup_steps": 1},
        distributed=distributed or {},
    )
    config = {**checkpoint.config, "num_hidden_layers": layers or checkpoint.config["num_hidden_layers"]}
    model = MegatronModel(read_architecture(config), options, rank, head=head)
    if layers is None:
        model.load_huggingface(checkpoint)
    else:
        for tensor in model.local_tensors().values():
            tensor.data.zero_()
    if reference:
        model.keep_reference()
    model.prepare_training(STEPS)
    return model


def train(model, steps: range, objective=None) -> dict:
    """`steps` of a run, of supervised fine-tuning without an `objective`."""
    from parallel_rank import parallel_rank

    results = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(3, 9, (6,), generator=generator)
        total = int(lengths.sum())
        weights = torch.ones(total) / total
        batch = RaggedBatch(torch.randint(4, 50, (total,), generator=generator), lengths, {"weights": weights})
        size = model.options.parallel.data_parallel_size
        results.append(
            model.train_step(
                batch, assign(lengths, size, 16)[parallel_rank().data], objective or SftObjective(), temperature=1.0
            )
        )
    return {
        "norms": [result.gradient_norm for result in results],
        "rates": [result.learning_rate for result in results],
        "losses": [total_loss(result) for result in results],
    }


def total_loss(result) -> float:
    """The loss of a step over all ranks; 0 if the metrics say none."""
    from parallel_rank import parallel_rank

    counted = parallel_rank().tensor == 0 and parallel_rank().context == 0
    loss = sum(float(part.sums["sft/loss"]) for part in result.metrics if hasattr(part, "sums") and counted)
    total = torch.tensor(loss, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


def outcome(model, steps: dict) -> dict:
    return {
        **steps,
        "random": float(torch.rand(())),
        "weights": {name: tensor.detach().clone() for name, tensor in model.local_tensors().items()},
    }


def train_and_save(rank: int, sizes: ParallelSizes, folder: Path, target: Path, options: Any = None) -> dict:
    """A run that is not interrupted: what it saves is written when all its tensors are others."""
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, **(options or {}))
    first = train(model, range(SAVED_AFTER))
    torch.manual_seed(rank + 100)
    target.mkdir(exist_ok=True)
    saving = checkpoint.Saving(model)
    with slow_copies(), held_back_writes() as may_write:
        saving.begin(target, in_background=True)
        second = train(model, range(SAVED_AFTER, STEPS))
        may_write.set()
        saving.finish()
    return outcome(model, {name: first[name] + second[name] for name in first})


@contextmanager
def slow_copies() -> Iterator[None]:
    """Inside, the copies of a save are begun late."""
    from megatron_ext.memory.host_copies import HostCopies

    copy = HostCopies.of

    def copy_late(self: HostCopies, tensors: Any) -> Any:
        time.sleep(0.3)
        return copy(self, tensors)

    with mock.patch.object(HostCopies, "of", copy_late):
        yield


@contextmanager
def held_back_writes() -> Iterator[threading.Event]:
    """Inside, nothing is written to files before the event is set."""
    from megatron_ext.checkpoint.checkpoint_writer import _Writer

    write, may_write = _Writer.write, threading.Event()

    def write_later(self: _Writer) -> None:
        may_write.wait()
        write(self)

    with mock.patch.object(_Writer, "write", write_later):
        yield may_write


def load_and_train(rank: int, sizes: ParallelSizes, folder: Path, target: Path, options: Any = None) -> dict:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, **(options or {}))
    checkpoint.load(model, target)
    return outcome(model, train(model, range(SAVED_AFTER, STEPS)))
