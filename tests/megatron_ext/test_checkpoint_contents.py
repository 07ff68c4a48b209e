"""A checkpoint holds all that a run goes on with, in megatron-core's own format, and no more is sent to write it."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import run_in_turn, run_ranks
from test_checkpoint import (
    DP2,
    SAVED_AFTER,
    STEPS,
    TP2,
    TP2_EP2,
    VPP2,
    load_and_train,
    make_model,
    outcome,
    train,
    train_and_save,
    write_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from converters.architectures import read_architecture
from converters.copying import check_distributed
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint, metadata
from converters.formats.torch_dist.saved_arguments import different_arguments
from converters.layouts.megatron import ParallelSizes

EXPECTATIONS = Path(__file__).parents[1] / "converters/megatron_lm_expectations.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Others:
    """Results of the cases below, all of which run in one launch."""

    references: Mapping[str, tuple[list[dict], list[dict]]]
    critics: Mapping[str, tuple[list[dict], list[dict]]]
    moved: list[dict[str, int]]
    again: list[list[int]]
    root: Path


@pytest.fixture(scope="module")
def others(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("others")
    references = {"TP2 EP2": TP2_EP2, "VPP2": VPP2}
    critics = {"TP2": (TP2, torch.bfloat16), "DP2": (DP2, torch.float32)}
    cases = []
    for name, sizes in references.items():
        cases += [(each, sizes, folder, root / name) for each in (refresh_and_save, load_with_reference)]
    for name, (sizes, dtype) in critics.items():
        target = root / f"critic {name}"
        cases += [(each, sizes, folder, target, dtype) for each in (train_critic_and_save, load_and_train_critic)]
    cases += [(moved_while_saving, DP2, folder, root / "moved"), (save_again, DP2, folder, root / "again")]
    results = iter(run_in_turn(cases))
    return Others(
        {name: (next(results), next(results)) for name in references},
        {name: (next(results), next(results)) for name in critics},
        next(results),
        next(results),
        root,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["TP2 EP2", "VPP2"])
def test_a_refreshed_reference_is_the_same_after_resuming(name, others):
    for before, after in zip(*others.references[name], strict=True):
        assert after["refreshed"]
        assert before["reference"].keys() == after["reference"].keys()
        assert any(not torch.equal(tensor, before["present"][name]) for name, tensor in before["reference"].items())
        for kind in ("reference", "present"):
            for name, tensor in before[kind].items():
                assert torch.equal(tensor, after[kind][name]), (kind, name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["TP2", "DP2"])
def test_a_critic_continues_as_if_it_had_not_been_interrupted(name, others):
    for before, after in zip(*others.critics[name], strict=True):
        assert before["weights"]["value_head.weight"].any()
        assert before["norms"] == after["norms"]
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name


@pytest.mark.long
def test_no_rank_sends_its_state_to_another_to_save_it(others):
    """Beside what megatron-core's own format sends, which is as much as the ranks have."""
    for moved in others.moved:
        assert moved["here"] == 0
        assert moved["megatron-core"] > moved["state"] // 2


@pytest.mark.long
def test_a_save_goes_by_the_plan_of_the_one_before_as_long_as_the_parts_are_the_same(others):
    # The third has the reference, too, which was refreshed.
    assert others.again == 2 * [[1, 0, 1]]


@pytest.mark.long
def test_megatron_core_reads_the_optimizer_s_state_as_its_own(others):
    assert [moved["different"] for moved in others.moved] == [0, 0]


def test_megatron_lm_finds_what_it_looks_for(alone, folder):
    root, _ = alone
    common = TorchDistCheckpoint(root / "rate").common
    expected = json.loads(EXPECTATIONS.read_text())["compared_with_the_checkpoint_by_megatron_lm"]
    arguments = vars(common["args"])
    assert set(expected) - arguments.keys() == set()
    architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
    assert list(different_arguments(architecture, arguments)) == []
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, SAVED_AFTER)
    assert common["opt_param_scheduler"]["num_steps"] == SAVED_AFTER
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Cases on one rank, in one launch."""
    root = tmp_path_factory.mktemp("alone")
    cases = {
        "never refreshed": (refresh_and_save, ParallelSizes(), folder, root / "reference", False),
        "resumed": (load_with_reference, ParallelSizes(), folder, root / "reference"),
        "saved": (train_and_save, ParallelSizes(), folder, root / "rate"),
        "same rate": (load_and_train, ParallelSizes(), folder, root / "rate"),
        "half the rate": (load_and_train, ParallelSizes(), folder, root / "rate", {"rate": 0.5}),
    }
    results = run_in_turn(list(cases.values()))
    return root, {name: result for name, (result,) in zip(cases, results, strict=True)}


@pytest.mark.long
def test_an_export_takes_the_policy_and_not_its_reference(others, folder):
    stored = TorchDistCheckpoint(others.root / "VPP2")
    check_distributed(stored, read_architecture(HuggingFaceCheckpoint(folder).config))
    assert any(key.startswith("reference.") for key in stored.contents.tensors)


def test_a_reference_that_was_never_refreshed_is_not_in_the_checkpoint(alone):
    root, results = alone
    assert not any(key.startswith("reference.") for key in keys_of(root / "reference"))
    assert not results["resumed"]["refreshed"]


def test_learning_rate_of_a_continued_run_is_that_of_its_configuration(alone):
    _, results = alone
    assert results["half the rate"]["rates"] == pytest.approx([0.5 * rate for rate in results["same rate"]["rates"]])


def refresh_and_save(rank: int, sizes: ParallelSizes, folder: Path, target: Path, refresh: bool = True) -> dict:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, reference=True)
    train(model, range(1))
    if refresh:
        model.refresh_reference()
    train(model, range(1, 2))
    target.mkdir(exist_ok=True)
    checkpoint.save(model, target)
    return with_reference(model)


def save_again(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> list[int]:
    """How often each of three saves was planned; each holds the values of its own time."""
    from megatron_ext.checkpoint import checkpoint, checkpoint_writer

    model = make_model(rank, sizes, folder, reference=True)
    saving, planned, saved = checkpoint.Saving(model), [], []
    for number in range(3):
        train(model, range(number, number + 1))
        if number == 2:
            model.refresh_reference()
        own = target / str(number)
        own.mkdir(parents=True, exist_ok=True)
        planner = checkpoint_writer.MCoreSavePlanner
        with mock.patch.object(
            planner, "create_local_plan", autospec=True, side_effect=planner.create_local_plan
        ) as plan:
            saving.begin(own, in_background=number == 1)
            saving.finish()
        planned.append(plan.call_count)
        saved.append({name: tensor.detach().clone() for name, tensor in model.local_tensors().items()})
    for number, weights in reversed(list(enumerate(saved))):
        checkpoint.load(model, target / str(number))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.local_tensors().items())
    return planned


def test_the_generator_of_a_gpu_goes_on_from_where_it_was_saved():
    assert run_ranks(random_numbers_of_a_gpu, ParallelSizes()) == [None]


def random_numbers_of_a_gpu(rank: int, sizes: ParallelSizes) -> None:
    from megatron_ext.checkpoint.checkpoint_state import set_rng_state, sharded_rng_state

    of_cpu = sharded_rng_state().data
    assert of_cpu.keys() == {"python", "numpy", "torch", "tracker"}
    gpu = torch.Generator().manual_seed(1)
    with mock.patch.multiple(
        torch.cuda, is_available=lambda: True, get_rng_state=gpu.get_state, set_rng_state=gpu.set_state
    ):
        saved = sharded_rng_state().data
        expected = torch.rand(3, generator=gpu)
        set_rng_state(saved)
        assert torch.equal(torch.rand(3, generator=gpu), expected)
        # One of an older checkpoint says nothing of it.
        set_rng_state(of_cpu)
    set_rng_state(saved)


def load_with_reference(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, reference=True)
    read = metadata.safe_load
    with mock.patch.object(metadata, "safe_load", side_effect=read) as reads:
        checkpoint.load(model, target)
    # The table of contents of a large model takes seconds: it is read once here, and twice by megatron-core.
    assert 1 <= reads.call_count <= 3
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
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, head="value", dtype=dtype)
    train(model, range(1), squared_error)
    target.mkdir(exist_ok=True)
    checkpoint.save(model, target)
    return outcome(model, train(model, range(1, STEPS), squared_error))


def load_and_train_critic(rank: int, sizes: ParallelSizes, folder: Path, target: Path, dtype: torch.dtype) -> dict:
    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder, head="value", dtype=dtype)
    checkpoint.load(model, target)
    return outcome(model, train(model, range(1, STEPS), squared_error))


def moved_while_saving(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict[str, int]:
    """Bytes of numbers in collectives: as a checkpoint is saved, and as megatron-core lists the optimizer's state."""
    from megatron.core import parallel_state

    from megatron_ext.checkpoint import checkpoint

    model = make_model(rank, sizes, folder)
    train(model, range(1))
    target.mkdir(exist_ok=True)
    with SentNumbers() as here:
        checkpoint.save(model, target)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    with SentNumbers() as there:
        weights = model.chunks[0].module.sharded_state_dict(metadata=metadata)
        model.optimizer.sharded_state_dict({"model": weights}, metadata=metadata)
    parameters = sum(tensor.numel() for tensor in model.local_tensors().values())
    return {
        "here": here.nbytes,
        "megatron-core": there.nbytes,
        "state": 3 * 4 * parameters // 2,
        "different": different_in_megatron_core(model, target, metadata),
    }


def different_in_megatron_core(model, target: Path, metadata: Mapping[str, Any]) -> int:
    """How many tensors of this rank's optimizer are others in what megatron-core's own optimizer reads."""
    from megatron.core import dist_checkpointing

    from megatron_ext.optimizer.optimizer_shards import main_states

    weights = model.chunks[0].module.sharded_state_dict(metadata=metadata)
    wanted = model.optimizer.sharded_state_dict({"model": weights}, is_loading=True, metadata=metadata)
    with torch.serialization.safe_globals([argparse.Namespace]):
        read = dist_checkpointing.load({"model": weights, "optimizer": wanted}, str(target))["optimizer"]
    assert read["param_state_sharding_type"] == "fully_reshardable"
    assert {group["step"] for group in read["optimizer"]["param_groups"]} == {1}
    (part,) = model.optimizer.chained_optimizers
    order = {id(weight): number for number, weight in enumerate(w for b in part.buffers for w in b.param_index_map)}
    return sum(
        not torch.equal(read["param_state"][order[id(state.weight)]][kind].flatten()[state.start :][: len(own)], own)
        for state in main_states(model.optimizer)
        for kind, own in state.tensors.items()
    )


class SentNumbers(TorchDispatchMode):
    """Counts the bytes of floating-point tensors that this rank gives to collectives, or gets from them."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self.nbytes += sum(each.nbytes for each in tensors if each.is_floating_point())
        return function(*args, **(kwargs or {}))
