"""A model whose weights FSDP2 has cut over data-parallel ranks computes, trains and is read as one that is whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from long_cases import but_long
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from parallel_rank import parallel_rank
from played_fused_adam import FusedAdam, beside_fused_adam
from safetensors.torch import load_file
from torch import Tensor

from converters.architectures import Lora, read_architecture
from converters.copying import copy_transfers
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.resharding.loader.buckets import cut_into_buckets, views
from megarl.resharding.loader.source import WeightSource
from megarl.resharding.shared_memory import Segment
from megatron_ext import compat, device
from megatron_ext.checkpoint import checkpoint
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.memory.offload import optimizer_tensors
from megatron_ext.memory.storages import nbytes_of, storages_of
from megatron_ext.optimizer.fully_sharded import is_cut, own_rows
from megatron_ext.options.options import AdapterOptions, MegatronOptions
from megatron_ext.options.supported_options import check_supported
from megatron_ext.packing.packing import RaggedBatch

LAYOUTS = {
    "DP2": ParallelSizes(world_size=2, use_torch_fsdp2=True),
    "DP3": ParallelSizes(world_size=3, use_torch_fsdp2=True),
    "CP2": ParallelSizes(world_size=2, context_parallel_size=2, use_torch_fsdp2=True),
    "TP2 DP2": ParallelSizes(world_size=4, tensor_model_parallel_size=2, use_torch_fsdp2=True),
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True, "vocab_size": 63},
    "qwen3_moe": {},
    "deepseek_v3": {},
}
SEQUENCES = 6
CASES = {"DP2": list(MODELS), "DP3": ["qwen3"], "CP2": ["qwen3", "qwen3 tied"], "TP2 DP2": list(MODELS)}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BUCKET_BYTES = 1 << 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(name.split()[0], root / name, fields=fields) for name, fields in MODELS.items()}


@pytest.fixture(scope="module")
def of_one_rank(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    return run_ranks(train_each, ParallelSizes(), folders, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize("layout", but_long(CASES, "DP2", "DP3"))
def test_an_update_is_that_of_one_rank(
    layout: str,
    folders: Mapping[str, Path],
    of_one_rank: Mapping[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    names = CASES[layout]
    ranks = run_ranks(train_each, LAYOUTS[layout], {name: folders[name] for name in names}, tmp_path)
    for name in names:
        one, found = of_one_rank[name], [each[name] for each in ranks]
        for rank in found:
            assert rank["norm"] == pytest.approx(one["norm"], rel=1e-5)
            for what in ("log_probs", "reference", "after"):
                for sequence, values in rank[what].items():
                    torch.testing.assert_close(values, one[what][sequence], rtol=0, atol=1e-5)
        assert {sequence for rank in found for sequence in rank["log_probs"]} == set(range(SEQUENCES))
        for what in ("gradients", "refit"):
            whole = {key: sum(rank[what][key] for rank in found) for key in one[what]}
            assert_close(name, what, whole, one[what])
        assert_close(name, "exported", read_all(tmp_path / name), one["exported"])
        assert found[0]["weight bytes"] < 1.1 * one["weight bytes"] / LAYOUTS[layout].weight_copies


def test_ranks_without_tokens_and_gradients_that_are_no_numbers(folders: Mapping[str, Path]) -> None:
    for found in run_ranks(train_in_trouble, LAYOUTS["DP2"], folders["deepseek_v3"]):
        assert found["norm"] > 0
        assert found["said"] == ["a gradient is not a number, or infinite: no weight was changed"] * 2
        assert found["changed"] == []
        assert found["away"] == [True, True]
        assert found["changed by a stay on the host"] == []


def train_in_trouble(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, Any]:
    model = make_model(rank, sizes, folder, dtype=torch.bfloat16)
    batch, places = own_batch(sizes)
    # The other rank has sequences in both.
    mine = [list(range(len(places))), []] if rank else micro_batches(len(places))
    norm = model.train_step(batch, mine, SftObjective()).gradient_norm
    before = copies(model)
    said = []
    for bad in (float("nan"), float("inf")):
        # Only one rank has it, before gradients are summed.
        batch.fields["weights"][1 if rank else slice(0)] = bad
        with pytest.raises(RuntimeError) as refused:
            model.train_step(batch, mine, SftObjective())
        said.append(str(refused.value))
    changed = different(before, model)
    weights = storages_of(model.local_tensors().values())
    model.offload(["weights", "training"])
    away = [all(not each.nbytes() for each in weights), not any(optimizer_bytes(model))]
    model.reload(["weights", "training"])
    return {
        "norm": norm,
        "said": said,
        "changed": changed,
        "away": away,
        "changed by a stay on the host": different(before, model),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
def test_a_checkpoint_has_the_refreshed_reference_and_main_parameters(
    dtype: torch.dtype, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    saved = run_ranks(save_with_reference, LAYOUTS["DP2"], folders["deepseek_v3"], tmp_path, dtype)
    for sizes in (LAYOUTS["DP2"], ParallelSizes()):
        for loaded in run_ranks(load_with_reference, sizes, folders["deepseek_v3"], tmp_path, dtype):
            for what in ("policy", "reference"):
                expected = {place: each for rank in saved for place, each in rank[what].items()}
                for place, found in loaded[what].items():
                    torch.testing.assert_close(found, expected[place], rtol=0, atol=1e-5)
            assert loaded["norm"] == pytest.approx(saved[0]["norm"], rel=1e-5 if dtype == torch.float32 else 1e-2)


def save_with_reference(rank: int, sizes: ParallelSizes, folder: Path, target: Path, dtype: torch.dtype) -> dict:
    model = make_model(rank, sizes, folder, dtype=dtype)
    model.keep_reference()
    batch, places = own_batch(sizes)
    for _ in range(2):
        model.train_step(batch, micro_batches(len(places)), SftObjective())
        if model.reference is not None and not model.reference.refreshed:
            model.refresh_reference()
    torch.distributed.barrier()
    checkpoint.save(model, target)
    return of_both(model)


def load_with_reference(rank: int, sizes: ParallelSizes, folder: Path, target: Path, dtype: torch.dtype) -> dict:
    model = make_model(rank, sizes, folder, dtype=dtype)
    model.keep_reference()
    checkpoint.load(model, target)
    return of_both(model)


def of_both(model: MegatronModel) -> dict[str, Any]:
    policy = log_probs(model)
    with model.reference_weights():
        reference = log_probs(model)
    batch, places = own_batch(model.options.parallel)
    norm = model.train_step(batch, micro_batches(len(places)), SftObjective()).gradient_norm
    assert any(not torch.equal(policy[place], reference[place]) for place in places)
    return {"policy": policy, "reference": reference, "norm": norm}


def copies(model: MegatronModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.local_tensors().items()}


def different(before: Mapping[str, Tensor], model: MegatronModel) -> list[str]:
    return [name for name, tensor in model.local_tensors().items() if not torch.equal(tensor, before[name])]


def optimizer_bytes(model: MegatronModel) -> list[int]:
    return [each.nbytes() for each in storages_of(optimizer_tensors(model.optimizer))]


def test_moments_are_rows_in_the_optimizer_that_a_gpu_has(folders: Mapping[str, Path], tmp_path: Path) -> None:
    for found in run_ranks(train_with_fused_adam, LAYOUTS["DP2"], folders["qwen3"], tmp_path):
        for kind in ("fused", "from its checkpoint"):
            assert found[kind].keys() == found["plain"].keys()
            for name, tensor in found["plain"].items():
                torch.testing.assert_close(found[kind][name], tensor, rtol=0, atol=1e-6)


def train_with_fused_adam(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict[str, Any]:
    """Weights after two steps, by the optimizer that took them."""

    def made() -> MegatronModel:
        return new_model(rank, sizes, folder, optimizer={"lr": 1e-3, "adam_eps": 1e-2})

    def step(model: MegatronModel) -> None:
        batch, places = own_batch(sizes)
        model.train_step(batch, micro_batches(len(places)), SftObjective())

    fused, continued, plain = made(), made(), made()
    plain.prepare_training(4)
    for _ in range(2):
        step(plain)
    with beside_fused_adam():
        fused.prepare_training(4)
        continued.prepare_training(4)
        step(fused)
        (part,) = compat.parts(fused.optimizer)
        assert isinstance(part.optimizer, FusedAdam)
        moments = [each for state in part.optimizer.state.values() for each in state.values()]
        assert moments
        assert all(map(is_cut, moments))
        torch.distributed.barrier()
        checkpoint.save(fused, target)
        checkpoint.load(continued, target)
        step(fused)
        step(continued)
    return {"fused": copies(fused), "from its checkpoint": copies(continued), "plain": copies(plain)}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"pipeline_model_parallel_size": 2}, "without pipeline_model_parallel_size=2"),
        ({"expert_model_parallel_size": 2}, "cuts experts over ranks that have other ones"),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "that have other parts of them"),
    ],
)
def test_sizes_that_the_wrapper_does_not_know_are_refused(sizes: Mapping[str, int], says: str) -> None:
    ParallelSizes(world_size=4, **sizes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says):
        ParallelSizes(world_size=4, use_torch_fsdp2=True, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_distributed_optimizer": True}, "cuts the optimizer's state over the ranks by itself"),
        ({"overlap_grad_reduce": True}, "layer by layer"),
        ({"grad_reduce_in_fp32": True}, "in the type of the weights"),
        ({"fp8": "e4m3"}, "not tested with it"),
        ({"bucket_size": 100}, "no gradient buffers"),
    ],
)
def test_options_of_the_other_wrapper_are_refused(options: Mapping[str, Any], says: str) -> None:
    check_supported(options)
    with pytest.raises(UserError, match=f"with megatron.use_torch_fsdp2=true: .*{says}"):
        check_supported({"use_torch_fsdp2": True, **options})


def test_sgd_needs_no_other_switch() -> None:
    check_supported({"use_torch_fsdp2": True, "optimizer": "sgd"})


def test_adapters_are_refused() -> None:
    with pytest.raises(UserError, match=r"an adapter .* is merged into whole ones"):
        MegatronOptions(LAYOUTS["DP2"], torch.float32, adapter=AdapterOptions(Lora(rank=2, alpha=4.0)))


@pytest.mark.skipif(device.gpus() > 0, reason="it has the device that it asks for")
def test_megatron_fsdp_asks_for_a_cuda_device_by_its_number(folders: Mapping[str, Path]) -> None:
    """Goes when megatron-core no longer does: then its refusal is due again."""
    with pytest.raises(RuntimeError, match=r"mcore_fsdp_adapter.py(?s:.*)Invalid device string: 'cuda:cpu'"):
        run_ranks(wrap_by_megatron_fsdp, ParallelSizes(world_size=2), folders["qwen3"])


def wrap_by_megatron_fsdp(rank: int, sizes: ParallelSizes, folder: Path) -> None:
    (chunk,) = make_model(rank, sizes, folder).bare_chunks
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    FullyShardedDataParallel(chunk.config, config, chunk)


def assert_close(name: str, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        worst = float((found[key] - tensor).abs().max()) / scale
        assert worst <= 1e-5, f"{what} of {name}: {key} is {worst} off"


def make_model(rank: int, sizes: ParallelSizes, folder: Path, *arguments: Any, **options: Any) -> MegatronModel:
    model = new_model(rank, sizes, folder, *arguments, **options)
    model.prepare_training(4)
    return model


def new_model(
    rank: int, sizes: ParallelSizes, folder: Path, transformer: Mapping[str, Any] | None = None, **options: Any
) -> MegatronModel:
    # SGD: where a gradient is next to nothing, Adam would make a whole step of its rounding.
    optimizer = options.pop("optimizer", {"lr": 1e-2, "optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 1.0})
    distributed = {} if sizes.use_torch_fsdp2 else {"use_distributed_optimizer": False}
    released = HuggingFaceCheckpoint(folder)
    model = MegatronModel(
        read_architecture(released.config),
        MegatronOptions(
            sizes,
            options.pop("dtype", torch.float32),
            optimizer=optimizer,
            distributed=distributed,
            transformer=transformer or {},
            **options,
        ),
        rank,
    )
    model.load_huggingface(released)
    return model


def train_each(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], target: Path) -> dict[str, dict[str, Any]]:
    return {name: train(rank, sizes, folder, target / name) for name, folder in folders.items()}


def train(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> dict[str, Any]:
    """An update, and all that reads weights, of recomputed layers: gradients are summed over two micro-batches."""
    model = make_model(rank, sizes, folder, RECOMPUTE)
    model.keep_reference()
    source = WeightSource(model.architecture, sizes, rank, model.local_tensors(), "local")
    before = log_probs(model)
    batch, places = own_batch(sizes)
    result = model.train_step(batch, micro_batches(len(places)), SftObjective())
    gradients = in_huggingface_names(model, own_gradients(model))
    with model.reference_weights():
        reference = log_probs(model)
    after = log_probs(model)
    refit = written(model, source)
    model.export_huggingface(target, folder)
    return {
        "norm": result.gradient_norm,
        "log_probs": before,
        "reference": reference,
        "after": after,
        "gradients": gradients,
        "refit": refit,
        "exported": read_all(target),
        "weight bytes": nbytes_of(storages_of(map(own_rows, model.bare_chunks[0].parameters()))),
    }


def own_batch(sizes: ParallelSizes) -> tuple[RaggedBatch, list[int]]:
    """The sequences of a data-parallel rank, and their numbers."""
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 4, 12, 7, 5, 8]
    tokens = [torch.randint(4, 50, (length,), generator=generator) for length in lengths]
    places = list(range(SEQUENCES))[parallel_rank().data :: sizes.data_parallel_size]
    mine = torch.cat([tokens[place] for place in places])
    lengths_of_mine = torch.tensor([lengths[place] for place in places])
    return RaggedBatch(mine, lengths_of_mine, {"weights": torch.full((len(mine),), 0.1)}), places


def micro_batches(sequences: int) -> list[list[int]]:
    return [[0], list(range(1, sequences))]


def log_probs(model: MegatronModel) -> dict[int, Tensor]:
    """By the number of a sequence."""
    batch, places = own_batch(model.options.parallel)
    found = model.log_probs(batch, micro_batches(len(places)), temperature=1.0)
    assert found is not None
    return dict(zip(places, found.log_probs.split(batch.lengths.tolist()), strict=True))


def own_gradients(model: MegatronModel) -> dict[str, Tensor]:
    """The rows that this rank has of each, by its name in a GPTModel."""
    parameters = model.bare_chunks[0].named_parameters()
    return {name: own_rows(each.grad) for name, each in parameters if each.grad is not None}


def in_huggingface_names(model: MegatronModel, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's share: shares add up to the whole."""
    shapes = model.architecture.hf_shapes
    share = {name: torch.zeros(shape) for name, shape in shapes.items()}
    layout = megatron_layout(model.architecture, model.options.parallel, module_names="local")
    transfers = plan(layout, huggingface_layout(shapes))
    mine = [each for each in transfers if each.source_rank == model.rank and each.source_name in local]
    copy_transfers(mine, local, share)
    return share


def written(model: MegatronModel, source: WeightSource) -> dict[str, Tensor]:
    """Bytes that this rank writes into the bucket of a refit, 0 where others write."""
    dtypes = dict.fromkeys(model.architecture.hf_shapes, torch.float32)
    (bucket,) = cut_into_buckets(model.architecture.hf_shapes, dtypes, BUCKET_BYTES, segments=1)
    segment = Segment(BUCKET_BYTES)
    segment.memory.zero_()
    source.map_segments([segment.handle()], BUCKET_BYTES)
    segment.close()
    source.write(bucket)
    return {name: tensor.clone() for name, tensor in views(bucket, segment.memory).items()}


def read_all(folder: Path) -> dict[str, Tensor]:
    return {key: each for file in sorted(folder.glob("*.safetensors")) for key, each in load_file(file).items()}
