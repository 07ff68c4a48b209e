"""A run continued from a checkpoint is the run that was not interrupted, bit for bit."""

import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from launch import run_ranks

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.balance import assign
from megatron_ext.packing import RaggedBatch

STEPS = 4
SAVED_AFTER = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(),
        ParallelSizes(world_size=2, expert_model_parallel_size=2),
        ParallelSizes(world_size=2, tensor_model_parallel_size=2),
        ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    ],
    ids=["1 rank", "EP2", "TP2", "PP2"],
)
def test_continued_run_is_the_uninterrupted_one(folder, sizes, tmp_path):
    whole = run_ranks(train_and_save, sizes, folder, tmp_path)
    continued = run_ranks(load_and_train, sizes, folder, tmp_path)
    for whole_rank, continued_rank in zip(whole, continued, strict=True):
        assert whole_rank["norms"][SAVED_AFTER:] == continued_rank["norms"]
        assert whole_rank["rates"][SAVED_AFTER:] == continued_rank["rates"]
        assert whole_rank["random"] == continued_rank["random"]
        for name, tensor in whole_rank["weights"].items():
            assert torch.equal(tensor, continued_rank["weights"][name]), name


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(
            world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
        ),
        ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    ],
    ids=["TP2 EP2", "VPP2"],
)
def test_a_refreshed_reference_is_the_same_after_resuming(sizes, tmp_path_factory, tmp_path):
    deeper = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 4})
    written = run_ranks(refresh_and_save, sizes, deeper, tmp_path)
    resumed = run_ranks(load_with_reference, sizes, deeper, tmp_path)
    for before, after in zip(written, resumed, strict=True):
        assert after["refreshed"]
        assert before["reference"].keys() == after["reference"].keys()
        assert any(not torch.equal(tensor, before["present"][name]) for name, tensor in before["reference"].items())
        for kind in ("reference", "present"):
            for name, tensor in before[kind].items():
                assert torch.equal(tensor, after[kind][name]), (kind, name)


def test_a_reference_that_was_never_refreshed_is_not_in_the_checkpoint(folder, tmp_path):
    run_ranks(refresh_and_save, ParallelSizes(), folder, tmp_path, False)
    assert not any(key.startswith("reference.") for key in keys_of(tmp_path))
    (resumed,) = run_ranks(load_with_reference, ParallelSizes(), folder, tmp_path)
    assert not resumed["refreshed"]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (ParallelSizes(world_size=2, tensor_model_parallel_size=2), torch.bfloat16),
        (ParallelSizes(world_size=2), torch.float32),
    ],
    ids=["TP2", "DP2"],
)
def test_a_critic_continues_as_if_it_had_not_been_interrupted(folder, sizes, dtype, tmp_path):
    whole = run_ranks(train_critic_and_save, sizes, folder, tmp_path, dtype)
    continued = run_ranks(load_and_train_critic, sizes, folder, tmp_path, dtype)
    for before, after in zip(whole, continued, strict=True):
        assert before["weights"]["value_head.weight"].any()
        assert before["norms"] == after["norms"]
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name


def test_learning_rate_of_a_continued_run_is_that_of_its_configuration(folder, tmp_path):
    run_ranks(train_and_save, ParallelSizes(), folder, tmp_path)
    (same,) = run_ranks(load_and_train, ParallelSizes(), folder, tmp_path)
    (halved,) = run_ranks(load_and_train, ParallelSizes(), folder, tmp_path, 0.5)
    assert halved["rates"] == pytest.approx([0.5 * rate for rate in same["rates"]])


def test_the_optimizer_s_state_is_gathered_where_it_is_written_and_nowhere_else(folder):
    assert run_ranks(holds_gathered_state, ParallelSizes(world_size=2), folder) == [True, False]


def test_saving_leaves_no_process(folder, tmp_path):
    assert run_ranks(children_after_saving, ParallelSizes(), folder, tmp_path) == [[]]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 64 KiB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system needs more rights")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_said_before_a_byte_is_written(folder, small_disk):
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2)
    target = small_disk / "iter_0000001.partial"
    target.mkdir()
    messages = run_ranks(save_on_a_full_disk, sizes, folder, target)
    assert messages[0] == messages[1]
    assert messages[0].startswith("cannot write a checkpoint of ")
    assert str(small_disk) in messages[0]
    assert list(target.iterdir()) == []


def make_model(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    rate: float = 1.0,
    *,
    head: str = "language_model",
    reference: bool = False,
    dtype: torch.dtype = torch.float32,
):
    from megatron_ext.megatron_model import MegatronModel
    from megatron_ext.options import MegatronOptions

    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes,
        dtype,
        optimizer={"lr": 1e-2 * rate, "min_lr": 1e-3 * rate, "weight_decay": 0.1},
        scheduler={"lr_decay_style": "linear", "lr_warmup_steps": 1},
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank, head=head)
    model.load_huggingface(checkpoint)
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
    return {"norms": [result.gradient_norm for result in results], "rates": [r.learning_rate for r in results]}


def outcome(model, steps: dict) -> dict:
    return {
        **steps,
        "random": float(torch.rand(())),
        "weights": {name: tensor.detach().clone() for name, tensor in model.local_tensors().items()},
    }


def train_and_save(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder)
    first = train(model, range(SAVED_AFTER))
    torch.manual_seed(rank + 100)
    checkpoint.save(model, target)
    second = train(model, range(SAVED_AFTER, STEPS))
    return outcome(model, {name: first[name] + second[name] for name in first})


def load_and_train(rank: int, sizes: ParallelSizes, folder: Path, target: Path, rate: float = 1.0) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder, rate)
    checkpoint.load(model, target)
    return outcome(model, train(model, range(SAVED_AFTER, STEPS)))


def refresh_and_save(rank: int, sizes: ParallelSizes, folder: Path, target: Path, refresh: bool = True) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder, reference=True)
    train(model, range(1))
    if refresh:
        model.refresh_reference()
    train(model, range(1, 2))
    checkpoint.save(model, target)
    return with_reference(model)


def load_with_reference(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder, reference=True)
    checkpoint.load(model, target)
    return with_reference(model)


def with_reference(model) -> dict:
    present = {name: tensor.detach().clone() for name, tensor in model.local_tensors().items()}
    return {"present": present, "reference": model.reference.tensors, "refreshed": model.reference.refreshed}


def keys_of(folder: Path) -> set[str]:
    from megatron.core import dist_checkpointing

    return set(dist_checkpointing.load_tensors_metadata(str(folder)))


def squared_error(values, micro_batch):
    return ((values - 3).square() * micro_batch.fields["weights"]).sum(), {}


def train_critic_and_save(rank: int, sizes: ParallelSizes, folder: Path, target: Path, dtype: torch.dtype) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder, head="value", dtype=dtype)
    train(model, range(1), squared_error)
    checkpoint.save(model, target)
    return outcome(model, train(model, range(1, STEPS), squared_error))


def load_and_train_critic(rank: int, sizes: ParallelSizes, folder: Path, target: Path, dtype: torch.dtype) -> dict:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder, head="value", dtype=dtype)
    checkpoint.load(model, target)
    return outcome(model, train(model, range(1, STEPS), squared_error))


def save_on_a_full_disk(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> str:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder)
    train(model, range(1))
    with pytest.raises(UserError) as raised:
        checkpoint.save(model, target)
    return str(raised.value)


def holds_gathered_state(rank: int, sizes: ParallelSizes, folder: Path) -> bool:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_ext import checkpoint, compat

    model = make_model(rank, sizes, folder)
    compat.prime_optimizer_state(model.optimizer)
    state = checkpoint._sharded_state(model, is_loading=False)["optimizer"]
    return any(getattr(part, "key", "").startswith("optimizer.state.") for part in nested_values(state))


def children_after_saving(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> list[str]:
    from megatron_ext import checkpoint

    model = make_model(rank, sizes, folder)
    train(model, range(1))
    checkpoint.save(model, target)
    return [child.name() for child in psutil.Process().children()]
