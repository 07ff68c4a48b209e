"""Weights in bf16 with main parameters in fp32: how far they are from fp32, and what the main parameters are for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from launch import run_in_turn, run_ranks
from parity import gradients
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")
LAYOUTS = {
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "EP2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
}
CASES = [
    *(("qwen3", layout) for layout in ("TP2", "PP2")),
    *(("qwen3_moe", layout) for layout in ("TP2", "EP2")),
    *(("deepseek_v3", layout) for layout in ("TP2", "PP2", "EP2")),
]
BOUNDS = {"qwen3": (0.008, 0.03, 0.03), "qwen3_moe": (0.015, 0.3, 0.12), "deepseek_v3": (0.01, 0.4, 0.04)}
"""Mean and largest difference of a log-prob; norm of the difference of all gradients, relative to theirs.

With experts a token whose scores are nearly the same goes to another one: few tokens, and by as much as experts differ.
"""
STEPS = 8
LENGTHS = (9, 4, 17, 30)


@pytest.fixture(scope="module")
def folders(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The tiny models with weights that bf16 has, in files of fp32."""
    rounded = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.bfloat16)
        rounded[name] = tmp_path_factory.mktemp(name)
        model.float().save_pretrained(rounded[name])
    return rounded


def batch() -> RaggedBatch:
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    tokens = torch.randint(4, 63, (total,), generator=generator)
    return RaggedBatch(tokens, torch.tensor(LENGTHS), {"weights": torch.full((total,), 1 / total)})


def model_of(rank: int, sizes: ParallelSizes, folder: Path, dtype: torch.dtype) -> MegatronModel:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(sizes, dtype, optimizer={"lr": 3e-5})
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    return model


def log_probs(rank: int, sizes: ParallelSizes, folder: Path) -> Tensor | None:
    found = model_of(rank, sizes, folder, torch.bfloat16).log_probs(batch(), [[0, 1], [2, 3]], temperature=1.0)
    return found.log_probs if found else None


def of_models(
    rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]
) -> dict[str, tuple[Tensor | None, dict[str, Tensor]]]:
    """By model, log-probs and this rank's share of the gradients in bf16."""
    return {
        name: (log_probs(rank, sizes, folder), gradients(rank, sizes, folder, params_dtype=torch.bfloat16))
        for name, folder in folders.items()
    }


def in_fp32(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, dict[str, Tensor]]:
    return {name: gradients(rank, sizes, folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def found(folders: Mapping[str, Path]) -> Mapping[str, list[dict[str, tuple[Tensor | None, dict[str, Tensor]]]]]:
    results = run_in_turn([(of_models, sizes, _that(folders, layout)) for layout, sizes in LAYOUTS.items()])
    return dict(zip(LAYOUTS, results, strict=True))


def _that(folders: Mapping[str, Path], layout: str) -> dict[str, Path]:
    return {name: folders[name] for name, of_layout in CASES if of_layout == layout}


@pytest.fixture(scope="module")
def exact(folders: Mapping[str, Path]) -> Mapping[str, tuple[Tensor, dict[str, Tensor]]]:
    """By model, log-probs of transformers and gradients of one process, both in fp32."""
    of_fp32 = run_ranks(in_fp32, ParallelSizes(), dict(folders))[0]
    return {name: (_of_transformers(folder), of_fp32[name]) for name, folder in folders.items()}


def _of_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for tokens in batch().tokens.split(LENGTHS):
            predicted = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            found += [torch.zeros(1), predicted.gather(-1, tokens[1:, None]).squeeze(-1)]
    return torch.cat(found)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_bf16_is_fp32_within_a_bound(
    name: str,
    layout: str,
    found: Mapping[str, list[dict[str, tuple[Tensor | None, dict[str, Tensor]]]]],
    exact: Mapping[str, tuple[Tensor, dict[str, Tensor]]],
) -> None:
    ranks = [results[name] for results in found[layout]]
    expected, whole = exact[name]
    differences = torch.stack([(each - expected).abs() for each, _ in ranks if each is not None])
    of_gradients = _relative_difference([share for _, share in ranks], whole)
    off = (float(differences.mean()), float(differences.max()), of_gradients)
    print(f"{name} {layout}: log-probs {off[0]:.4f} on average, {off[1]:.4f} at most; gradients {off[2]:.4f}")
    assert all(0 < value < bound for value, bound in zip(off, BOUNDS[name], strict=True))


def _relative_difference(shares: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> float:
    summed = {name: torch.stack([share[name].float() for share in shares]).sum(0) for name in whole}
    off = sum(float((summed[name] - each).square().sum()) for name, each in whole.items())
    return (off / sum(float(each.square().sum()) for each in whole.values())) ** 0.5


def trained(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Weights before and after steps, each of which is too small for a weight in bf16 to change by."""
    results = {}
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        model = model_of(rank, sizes, folder, dtype)
        results[f"{name} before"] = {key: tensor.detach().clone() for key, tensor in model.local_tensors().items()}
        model.prepare_training(STEPS)
        for _ in range(STEPS):
            model.train_step(batch(), [[0, 1], [2, 3]], SftObjective())
        results[name] = {key: tensor.detach().clone() for key, tensor in model.local_tensors().items()}
    return results


def test_steps_below_the_resolution_of_bf16_add_up(folders: Mapping[str, Path]) -> None:
    (found,) = run_ranks(trained, ParallelSizes(), folders["qwen3"])
    moved, too_small = 0, 0
    for name, weight in found["bf16"].items():
        before, exact = found["bf16 before"][name].float(), found["fp32"][name]
        spacing = torch.exp2(before.abs().log2().floor() - 7)
        # A step rounds to nothing, and all of them together do not.
        together = ((exact - before).abs() > spacing) & ((exact - before).abs() / STEPS < 0.4 * spacing)
        too_small += int(together.sum())
        moved += int((together & (weight.float() != before)).sum())
    print(moved, too_small)
    assert too_small > 10_000
    assert moved > 0.95 * too_small
