"""Where a checkpoint cannot be written, or the run that goes on is not the one that was saved, one sentence says so."""

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from file_sizes import files_up_to
from launch import run_in_turn, run_ranks
from test_checkpoint import SGD, make_model, outcome, train, train_and_save, write_model

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


UNFIT = {
    "other type": (
        {"dtype": torch.bfloat16},
        r"rate has .* in float32, and this run trains it in bfloat16: set model.dtype as it was, or begin a new run",
    ),
    "other optimizer": (
        SGD,
        r"rate was written with another optimizer: it has no momentum_buffer of .*, but exp_avg, exp_avg_sq, param",
    ),
    "other model": (
        {"layers": 2},
        r"rate is a checkpoint of another model: decoder\.layers\..* is \[4, .*\] there, and \[2, .*\] here; take the",
    ),
    "other head": (
        {"head": "value"},
        r"rate is a checkpoint of another model: it has no value_head.weight; take the model.path",
    ),
}
"""How a run that goes on is not the one that was saved -> what is said of it."""


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Cases on one rank, in one launch."""
    root = tmp_path_factory.mktemp("alone")
    cases = {
        "saved": (train_and_save, ParallelSizes(), folder, root / "rate"),
        "failed": (save_beyond_a_limit, ParallelSizes(), folder, root / "failed"),
        "failed at once": (begin_beyond_a_limit, ParallelSizes(), folder, root / "failed"),
        **{name: (refused, ParallelSizes(), folder, root / "rate", options) for name, (options, _) in UNFIT.items()},
        "remainders": (refused_with_remainders, ParallelSizes(), folder, root / "rate"),
    }
    results = run_in_turn(list(cases.values()))
    return root, {name: result for name, (result,) in zip(cases, results, strict=True)}


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_of_another_kind_of_run_is_one_sentence(name, alone):
    _, results = alone
    assert re.search(UNFIT[name][1], results[name])


def test_main_parameters_are_not_read_as_what_weights_lack_of_them(alone):
    _, results = alone
    assert re.search(
        r"rate keeps optimizer.state.param.* in float32, and this run in int16: set megatron.use_precision_aware_opt",
        results["remainders"],
    )


def test_a_failed_write_in_the_background_is_an_error_of_the_run(alone):
    root, results = alone
    assert results["failed"] == 2 * [too_large(root)]


def test_a_failed_write_of_what_is_no_tensor_is_the_same_error(alone):
    root, results = alone
    assert results["failed at once"] == too_large(root)


def too_large(root: Path) -> str:
    return (
        f"cannot write a checkpoint below {root}: File too large; free space or choose another output_dir"
        " (the last complete checkpoint is untouched)"
    )


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


def save_on_a_full_disk(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> str:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder)
    train(model, range(1))
    with pytest.raises(UserError) as raised:
        checkpoint.save(model, target)
    return str(raised.value)


def refused(rank: int, sizes: ParallelSizes, folder: Path, target: Path, options: Mapping[str, Any]) -> str:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, **options)
    before = outcome(model, {})["weights"]
    with pytest.raises(UserError) as raised:
        checkpoint.load(model, target)
    after = model.local_tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return str(raised.value)


def refused_with_remainders(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> str:
    """The refusal where the optimizer keeps main parameters as Transformer Engine's does beside weights in bf16."""
    from megatron_ext.checkpoint import checkpoint

    def states_with_remainders(optimizer: Any) -> list[Any]:
        found = main_states(optimizer)
        return [replace(state, tensors={**state.tensors, "param": state.tensors["param"].short()}) for state in found]

    main_states = checkpoint.main_states
    with mock.patch.object(checkpoint, "main_states", states_with_remainders):
        return refused(rank, sizes, folder, target, {})


def wait_until_written(saving) -> None:
    while not saving.is_written():
        time.sleep(0.01)


def save_beyond_a_limit(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> list[str]:
    """Sentences in which a run hears that a file could not become as large as it had to: as it asks, and at the end."""
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder)
    target.mkdir(exist_ok=True)
    saving = checkpoint.Saving(model)
    said = []
    with files_up_to(200_000):
        saving.begin(target, in_background=True)
        for ask in (partial(wait_until_written, saving), saving.finish):
            with pytest.raises(UserError) as raised:
                ask()
            said.append(str(raised.value))
    return said


def begin_beyond_a_limit(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> str:
    """The sentence where even the smallest file, as of a user without quota, could not be written."""
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder)
    target.mkdir(exist_ok=True)
    with files_up_to(100), pytest.raises(UserError) as raised:
        checkpoint.save(model, target)
    return str(raised.value)
