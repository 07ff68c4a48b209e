"""A backbone with a value head: the scores of transformers, the gradients of plain torch, under every parallel size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parity import sequences
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.engine import MegatronEngine
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import MicroBatch, RaggedBatch, last_tokens
from megatron_ext.parallel import parallel_rank

SIZES = {
    "one": ParallelSizes(),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "DP2 EP2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "DP2": ParallelSizes(world_size=2),
}
MODELS = {"qwen3": ("one", "TP2", "PP2", "DP2"), "qwen3_moe": ("one", "TP2", "DP2 EP2")}
TOLERANCE = 1e-5
# Sequences of each micro-batch, of each data-parallel rank.
CUTS = {1: [[[3, 0], [4], [1, 2]]], 2: [[[2, 0], [4]], [[1], [3]]]}


def sequences_of_a_batch() -> list[Tensor]:
    return sequences()[0]


def whole_batch() -> RaggedBatch:
    tokens = sequences_of_a_batch()
    total = sum(len(each) for each in tokens)
    target = torch.linspace(-1, 1, total).sin()
    return RaggedBatch(torch.cat(tokens), torch.tensor([len(each) for each in tokens]), {"target": target})


@pytest.fixture(scope="module")
def folders(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Classifiers of one label, as transformers saves them."""
    result = {}
    for name in MODELS:
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_pretrained(
            tiny_models[name], num_labels=1, dtype=torch.float32, pad_token_id=0
        )
        result[name] = tmp_path_factory.mktemp(f"{name}_classifier")
        model.save_pretrained(result[name])
    return result


class SquaredError:
    """Values towards the field `target`, scores towards 3; every index and sequence counts with its own weight."""

    def __call__(self, values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict]:
        per_token = (values - micro_batch.fields["target"]).square() * micro_batch.targets
        return per_token.sum() / 10 + (values[last_tokens(micro_batch)] - 3).square().sum(), {}


def make_engine(rank: int, sizes: ParallelSizes, folder: Path, dtype: torch.dtype = torch.float32) -> MegatronEngine:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(sizes, dtype, optimizer={"lr": 1e-2, "clip_grad": 0.0})
    engine = MegatronEngine(read_architecture(checkpoint.config), options, rank, head="value")
    with torch.no_grad():
        for tensor in engine.local_tensors().values():
            tensor.fill_(float("nan"))
    engine.load_huggingface(checkpoint)
    return engine


def own_part(sizes: ParallelSizes) -> tuple[RaggedBatch, list[list[int]], list[int]]:
    """This rank's batch, its micro-batches, and which sequences of the whole batch it has."""
    cut = CUTS[sizes.data_parallel_size][parallel_rank().data]
    chosen = [index for micro_batch in cut for index in micro_batch]
    place = {index: position for position, index in enumerate(sorted(chosen))}
    micro_batches = [[place[index] for index in micro_batch] for micro_batch in cut]
    return whole_batch().select(sorted(chosen)), micro_batches, sorted(chosen)


def predictions_and_gradients(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, Any]:
    results = {}
    for name, folder in folders.items():
        engine = make_engine(rank, sizes, folder)
        batch, micro_batches, chosen = own_part(sizes)
        values, scores = engine.values(batch, micro_batches), engine.scores(batch, micro_batches)
        engine.prepare_training(1)
        before = {key: tensor.detach().clone() for key, tensor in engine.local_tensors().items()}
        step = engine.train_step(batch, micro_batches, SquaredError())
        results[name] = {
            "chosen": chosen,
            "values": values,
            "scores": scores,
            "norm": step.gradient_norm,
            "head gradient": _main_grad(engine),
            "moved": {key: not torch.equal(tensor, before[key]) for key, tensor in engine.local_tensors().items()},
            "names": set(before),
        }
    return results


def _main_grad(engine: MegatronEngine) -> Tensor | None:
    heads = [p for n, p in engine.chunks[-1].module.named_parameters() if n == "value_head.weight"]
    # After the step the buffer holds the reduced gradient of the rank's shard alone: the parameter is small enough.
    return heads[0].main_grad.clone() if heads else None


@pytest.fixture(scope="module")
def expected(folders: Mapping[str, Path]) -> Mapping[str, dict[str, Any]]:
    """From transformers: values, scores, the norm of the gradient of SquaredError, and that of the head."""
    results = {}
    for name, folder in folders.items():
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        values, scores = [], []
        for tokens in sequences_of_a_batch():
            hidden = model.model(tokens[None]).last_hidden_state[0]
            values.append(model.score(hidden)[:, 0])
            scores.append(model(tokens[None]).logits[0, 0])
        target = whole_batch().split_field("target")
        loss = sum(
            (v[:-1] - t[1:]).square().sum() / 10 + (s - 3).square()
            for v, s, t in zip(values, scores, target, strict=True)
        )
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[name] = {
            "values": [torch.cat([torch.zeros(1), v.detach()[:-1]]) for v in values],
            "scores": torch.stack(scores).detach(),
            "norm": float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()),
            "head gradient": model.score.weight.grad,
        }
    return results


@pytest.mark.parametrize("sizes", list(SIZES))
def test_values_scores_and_gradients_are_those_of_transformers(
    sizes: str, folders: Mapping[str, Path], expected: Mapping[str, dict[str, Any]]
) -> None:
    names = [name for name in MODELS if sizes in MODELS[name]]
    ranks = run_ranks(predictions_and_gradients, SIZES[sizes], {name: folders[name] for name in names})
    for name in names:
        wanted, seen = expected[name], set()
        for rank in ranks:
            result = rank[name]
            assert not any("output_layer" in each for each in result["names"])
            assert result["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
            assert all(result["moved"].values())
            if result["values"] is None:
                continue
            seen |= set(result["chosen"])
            values = torch.cat([wanted["values"][index] for index in result["chosen"]])
            torch.testing.assert_close(result["values"], values, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(result["scores"], wanted["scores"][result["chosen"]], atol=TOLERANCE, rtol=0)
            assert result["values"].dtype == result["scores"].dtype == torch.float32
        assert seen == set(range(5))
