"""Whatever is recomputed, gradients stay what they were, and fewer activations are alive at any time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from launch import run_ranks
from parity import gradients
from torch import Tensor

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.model.model import transformer_config

Options = dict[str, Any]


def full(method: str, layers: int) -> Options:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> Options:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


CASES: Mapping[str, Mapping[str, Options]] = {
    "qwen3": {
        "two layers at a time": full("uniform", 2),
        "the first three layers": full("block", 3),
        "attention": selective("core_attn"),
        "norms": selective("layernorm"),
        "dense MLPs": selective("mlp"),
    },
    "qwen3_moe": {"norms": selective("layernorm"), "experts": selective("moe")},
    "deepseek_v3": {
        "every layer": full("uniform", 1),
        "latent attention and norms": selective("core_attn", "mla_up_proj", "layernorm"),
        "dense MLPs": selective("mlp"),
        "experts": selective("moe"),
        "shared experts": selective("shared_experts"),
    },
}
"""Model -> words for what is recomputed -> options."""


class _Kept:
    """A tensor that is kept for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Alive:
    """The most bytes that are kept whenever a backward pass begins, or goes on; each memory counted once."""

    def __init__(self) -> None:
        self.peak = 0
        self._kept: WeakSet[_Kept] = WeakSet()
        self._grew = False

    def keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.add(kept)
        self._grew = True
        return kept

    def give(self, kept: _Kept) -> Tensor:
        if self._grew:
            storages = {each.tensor.untyped_storage()._cdata: each.tensor.untyped_storage() for each in self._kept}
            # The results that are to be computed again have given their memory back.
            self.peak = max(self.peak, sum(storage.nbytes() for storage in storages.values()))
            self._grew = False
        return kept.tensor


@contextmanager
def counted() -> Iterator[_Alive]:
    alive = _Alive()
    with torch.autograd.graph.saved_tensors_hooks(alive.keep, alive.give):
        yield alive


def of_options(
    rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], cases: Mapping[str, Sequence[Options]]
) -> dict[str, list[tuple[dict[str, Tensor], int]]]:
    """Gradients and bytes alive, by model and options."""

    def run(folder: Path, options: Options) -> tuple[dict[str, Tensor], int]:
        with counted() as alive:
            return gradients(rank, sizes, folder, options), alive.peak

    return {name: [run(folders[name], options) for options in of_model] for name, of_model in cases.items()}


@pytest.fixture(scope="module")
def found(tiny_models: Mapping[str, Path]) -> Mapping[str, list[tuple[dict[str, Tensor], int]]]:
    cases = {name: [{}, *of_model.values()] for name, of_model in CASES.items()}
    return run_ranks(of_options, ParallelSizes(), tiny_models, cases)[0]


@pytest.mark.parametrize(
    ("name", "recomputed"), [(name, recomputed) for name, of_model in CASES.items() for recomputed in of_model]
)
def test_recompute_changes_no_gradient_and_keeps_less(
    name: str, recomputed: str, found: Mapping[str, list[tuple[dict[str, Tensor], int]]]
) -> None:
    (expected, everything), *others = found[name]
    got, kept = dict(zip(CASES[name], others, strict=True))[recomputed]
    print(f"{name}, {recomputed}: {kept / everything:.2f} of {everything:,} bytes are kept")
    assert kept < 0.97 * everything
    for key, whole in expected.items():
        scale = max(1.0, float(whole.abs().max()))
        # Gradients that meet behind a norm are added up in another order, which rounds them by up to 1.06e-6.
        torch.testing.assert_close(got[key] / scale, whole / scale, atol=2e-6, rtol=0, msg=lambda text, k=key: k + text)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3_moe", selective("moe_act"), "moe_act in recompute_modules is only supported with moe_grouped_gemm"),
        ("qwen3", selective("mla_up_proj"), "mla_up_proj .* multi_latent_attention"),
        ("qwen3", selective("attention"), "attention"),
        ("qwen3", {**selective("mlp"), "recompute_num_layers": 1}, "recompute_num_layers=1 is for"),
        ("qwen3", {"recompute_granularity": "full"}, "=full needs .*recompute_method"),
    ],
)
def test_what_cannot_be_recomputed_is_refused_by_name(
    name: str, options: Options, words: str, tiny_models: Mapping[str, Path]
) -> None:
    architecture = read_architecture(HuggingFaceCheckpoint(tiny_models[name]).config)
    with pytest.raises(UserError, match=words):
        transformer_config(architecture, ParallelSizes(), params_dtype=torch.float32, overrides=options)
