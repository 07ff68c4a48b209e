"""A rank's state that goes to the host and comes back: its memory is free in between, and no bit is another."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks
from long_cases import but_long

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.memory.device_memory import ALL_PARTS, CountedMemory, DeviceFullError
from megatron_ext.memory.offload import OffloadableState, optimizer_tensors
from megatron_ext.memory.storages import HostCopy, nbytes_of, storages_of
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

STEPS = 2
FP32 = MegatronOptions(ParallelSizes(), torch.float32, optimizer={"lr": 1e-2})
BF16 = MegatronOptions(ParallelSizes(), torch.bfloat16, optimizer={"lr": 1e-2})
EXPERTS = {"expert_model_parallel_size": 2}
RUNS: Mapping[str, tuple[MegatronOptions, ParallelSizes]] = {
    # The main parameters are views of the weights.
    "fp32": (FP32, ParallelSizes()),
    "bf16 EP2": (BF16, ParallelSizes(world_size=2, **EXPERTS)),
    "bf16 TP2 PP2 VPP2 SGD": (
        replace(
            BF16,
            optimizer={"lr": 1e-2, "optimizer": "sgd", "sgd_momentum": 0.9},
            distributed={"use_distributed_optimizer": False},
        ),
        ParallelSizes(
            world_size=4,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        ),
    ),
    "bf16 DP2, gathering in the forward pass": (
        replace(BF16, distributed={"overlap_grad_reduce": True, "overlap_param_gather": True}),
        ParallelSizes(world_size=2),
    ),
}


@pytest.mark.parametrize("run", but_long(RUNS, "bf16 TP2 PP2 VPP2 SGD"))
def test_a_run_that_is_moved_between_steps_trains_the_same_bits(run: str, tiny_models: Mapping[str, Path]) -> None:
    options, sizes = RUNS[run]
    options = replace(options, parallel=sizes)
    for stayed, moved in run_ranks(stayed_and_moved, sizes, options, tiny_models["qwen3_moe"]):
        assert stayed.keys() == moved.keys()
        for name, expected in stayed.items():
            assert torch.equal(moved[name], expected), name


def stayed_and_moved(rank: int, sizes: ParallelSizes, options: MegatronOptions, folder: Path) -> list[dict[str, Any]]:
    return [trained(rank, options, folder, moves=moves) for moves in (False, True)]


def trained(rank: int, options: MegatronOptions, folder: Path, *, moves: bool) -> dict[str, Any]:
    model = made(rank, options, folder)
    # References that others keep before it moves have to be good afterwards.
    kept = {name: tensor.detach() for name, tensor in model.local_tensors().items()}
    found = {}
    for step in range(STEPS):
        result = model.train_step(batch(step), [[0, 1], [2]], SftObjective())
        found[f"norm {step}"] = torch.tensor(result.gradient_norm)
        if moves:
            move(model)
        with model.reference_weights():
            log_probs = model.log_probs(batch(step), [[0, 1], [2]], temperature=1.0)
        if log_probs is not None:
            found[f"reference {step}"] = log_probs.log_probs
    return found | {name: tensor.clone() for name, tensor in kept.items()}


def move(model: MegatronModel) -> None:
    """There and back, as the turns of a step go; what is away has no memory."""
    state = [*model.local_tensors().values(), *optimizer_tensors(model.optimizer), *model.reference.tensors.values()]
    state += [each.grad_data for chunk in model.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    storages = storages_of(state)
    assert nbytes_of(storages) > 0
    model.offload(["training"])
    weights = nbytes_of(storages_of(model.local_tensors().values()))
    assert nbytes_of(storages) == weights > 0
    model.offload(ALL_PARTS)
    assert nbytes_of(storages) == 0
    with pytest.raises(RuntimeError, match="not the trainers' turn"):
        model.local_tensors()
    model.reload(["weights"])
    with pytest.raises(RuntimeError, match="optimizer state and reference weights of a rank are on the host"):
        model.train_step(batch(0), [[0, 1, 2]], SftObjective())
    model.reload(ALL_PARTS)


def made(rank: int, options: MegatronOptions, folder: Path) -> MegatronModel:
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.keep_reference()
    model.prepare_training(STEPS)
    return model


def batch(step: int) -> RaggedBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([9, 4, 17])
    total = int(lengths.sum())
    fields = {"weights": torch.full((total,), 1 / total)}
    return RaggedBatch(torch.randint(4, 63, (total,), generator=generator), lengths, fields)


def test_what_does_not_fit_beside_others_stays_away(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run_ranks(moved_within_a_limit, ParallelSizes(), tiny_models["qwen3"], tmp_path / "device")


def moved_within_a_limit(rank: int, sizes: ParallelSizes, folder: Path, counts: Path) -> None:
    model = made(rank, FP32, folder)
    memory = CountedMemory(counts)
    model.residence.count_in(memory)
    before = memory.take_peak()
    model.train_step(batch(0), [[0, 1, 2]], SftObjective())
    # An optimizer makes its moments in its first step.
    whole = memory.take_peak()
    weights = nbytes_of(storages_of(model.local_tensors().values()))
    assert whole > before + 1.9 * weights
    model.offload(ALL_PARTS)
    assert (memory.take_peak(), memory.take_peak()) == (whole, 0)
    other = CountedMemory(counts, limit_bytes=whole)
    other.hold("weights", whole - weights)
    model.residence.count_in(CountedMemory(counts, limit_bytes=whole))
    model.reload(["weights"])
    with pytest.raises(DeviceFullError, match=r"cluster\.device_memory_bytes"):
        model.reload(ALL_PARTS)
    assert not model.residence.has("training")
    other.hold("weights", 0)
    model.reload(ALL_PARTS)
    assert memory.take_peak() == whole


def test_what_a_device_without_room_did_not_take_back_is_still_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.arange(1000.0), torch.arange(2000.0)]
    expected = [weight.clone() for weight in weights]
    residence = OffloadableState(lambda: iter(weights))
    residence.offload(["weights"])
    resize, left = torch.UntypedStorage.resize_, iter([True])

    def resize_once(storage: torch.UntypedStorage, size: int) -> None:
        if size and not next(left, False):
            raise torch.OutOfMemoryError
        resize(storage, size)

    with monkeypatch.context() as full:
        full.setattr(torch.UntypedStorage, "resize_", resize_once)
        with pytest.raises(DeviceFullError, match=r"the weights of a rank, 12,000 bytes and .* give engines a smaller"):
            residence.reload(["weights"])
    assert not residence.has("weights")
    assert nbytes_of([weight.untyped_storage() for weight in weights]) == 0
    residence.reload(["weights"])
    assert residence.has("weights")
    assert all(map(torch.equal, weights, expected))


def test_quantised_copies_go_with_the_weights(tiny_models: Mapping[str, Path]) -> None:
    assert run_ranks(copies_left, ParallelSizes(), tiny_models["qwen3"]) == [[1, 0]]


def copies_left(rank: int, sizes: ParallelSizes, folder: Path) -> list[int]:
    """How many codes a layer has, as Transformer Engine keeps them, with the training state away, and with all."""
    model = made(rank, FP32, folder)
    layer = next(each for each in model.bare_chunks[0].modules() if hasattr(each, "linear_fc1")).linear_fc1
    layer._fp8_workspaces = {"weight": torch.zeros(4096, dtype=torch.uint8)}
    found = []
    for parts in (["training"], ALL_PARTS):
        model.offload(parts)
        found.append(len(layer._fp8_workspaces))
    return found


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_routes_of_tokens_go_with_the_weights(tiny_models: Mapping[str, Path], dispatcher: str) -> None:
    (kept,) = run_ranks(routes_left, ParallelSizes(), tiny_models["qwen3_moe"], dispatcher)
    before, *after = ({name for _, name in each} for each in kept)
    assert before >= ({"probs", "routing_map", "token_probs"} if dispatcher == "alltoall" else {"local_map"})
    orders = {"sort_input_by_local_experts", "restore_output_by_local_experts"}
    assert after == [orders & before] * 2


def routes_left(rank: int, sizes: ParallelSizes, folder: Path, dispatcher: str) -> list[set[tuple[int, str]]]:
    """Tensors that dispatchers have after a step, then with all away, and so again after a second step."""
    options = replace(FP32, transformer={"moe_token_dispatcher_type": dispatcher})
    model = made(rank, options, folder)
    owners = [each.token_dispatcher for each in model.bare_chunks[0].modules() if hasattr(each, "token_dispatcher")]
    for owner in owners:
        owner._comm_manager = SimpleNamespace(token_probs=torch.ones(3), capacity=None)
    owners += [owner._comm_manager for owner in owners]
    found = []
    for step in range(2):
        model.train_step(batch(step), [[0, 1], [2]], SftObjective())
        if not step:
            found.append(tensors_of(owners))
        model.offload(ALL_PARTS)
        found.append(tensors_of(owners))
        model.reload(ALL_PARTS)
    return found


def tensors_of(owners: Sequence[Any]) -> set[tuple[int, str]]:
    return {
        (number, name)
        for number, owner in enumerate(owners)
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.long
def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    counts = tmp_path / "device"
    memory, context = CountedMemory(counts, limit_bytes=10), multiprocessing.get_context("spawn")
    holding = context.Event()
    other = context.Process(target=hold_until_killed, args=(counts, holding))
    other.start()
    assert holding.wait(timeout=250)
    with pytest.raises(DeviceFullError, match="weights, 4 bytes, do not fit beside the 7 that are held"):
        memory.hold("weights", 4)
    memory.hold("weights", 3)
    other.kill()
    other.join()
    assert (memory.take_peak(), memory.take_peak()) == (10, 3)
    memory.hold("weights", 10)


def hold_until_killed(counts: Path, holding: Event) -> None:
    CountedMemory(counts).hold("weights", 7)
    holding.set()
    time.sleep(3600)


def test_whoever_reads_the_state_is_waited_for_before_it_changes(tiny_models: Mapping[str, Path]) -> None:
    (unchanged,) = run_ranks(unchanged_for_a_reader, ParallelSizes(), tiny_models["qwen3"])
    assert unchanged == {name: [True] for name in CHANGES}


CHANGES: Mapping[str, Callable[[MegatronModel], Any]] = {
    "log-probs": lambda model: model.log_probs(batch(0), [[0, 1, 2]], temperature=1.0),
    "the next step": lambda model: model.train_step(batch(1), [[0, 1, 2]], SftObjective()),
    "log-probs of the reference": lambda model: model.reference_weights().__enter__(),
    "a new reference": lambda model: model.refresh_reference(),
    "a turn of others": lambda model: model.offload(ALL_PARTS),
}


def unchanged_for_a_reader(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, list[bool]]:
    """By what changes the state, whether it was the same each time that the reader was waited for."""
    found: dict[str, list[bool]] = {}
    for name, change in CHANGES.items():
        model = made(rank, FP32, folder)
        model.train_step(batch(0), [[0, 1], [2]], SftObjective())
        state = [
            *model.local_tensors().values(),
            *optimizer_tensors(model.optimizer),
            *model.reference.tensors.values(),
        ]
        before, found[name] = [tensor.detach().clone() for tensor in state], []

        def wait(state: Any = state, before: Any = before, seen: Any = found[name]) -> None:
            seen.append(all(map(torch.equal, state, before)))

        model.lend_state(wait)
        change(model)
        if name == "log-probs":
            assert found[name] == []
            model.lend_state(wait)
    return found


@pytest.mark.parametrize("bucket_bytes", [2**11, 5000, 2**28])
def test_bytes_go_in_buckets_whatever_the_views(bucket_bytes: int) -> None:
    memory = torch.arange(4000.0)
    views = [memory[7:], memory.view(40, 100).T, torch.arange(3000, dtype=torch.int16), torch.ones(3)]
    expected = [view.clone() for view in views]
    storages = storages_of(views)
    assert len(storages) == 2
    copy = HostCopy(storages, bucket_bytes)
    assert copy.nbytes == 16_000 + 6_000
    assert nbytes_of(storages) == memory.untyped_storage().nbytes() == 0
    # Others take the memory meanwhile.
    others = [torch.full((4000,), float("nan")) for _ in range(4)]
    copy.reload()
    assert all(map(torch.equal, views, expected))
    del others


def test_memory_of_others_is_not_given_back() -> None:
    foreign = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="4096 bytes of a tensor belong to somebody else"):
        HostCopy(storages_of([foreign]))
