"""A backbone with a value head: the scores of transformers, the gradients of plain torch, under every parallel size."""

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parallel_rank import parallel_rank
from parity import sequences
from played_fused_adam import beside_fused_adam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Gemma2Config, Gemma2ForCausalLM

from converters.architectures import read_architecture, with_value_head
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megatron_ext.checkpoint.distributed_weights import load_distributed
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, last_tokens

SIZES = {
    "one": ParallelSizes(),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "DP2 EP2": ParallelSizes(world_size=2, expert_model_parallel_size=2),
    "DP2": ParallelSizes(world_size=2),
    # The head has one row, and the second rank none of it.
    "FSDP2": ParallelSizes(world_size=2, use_torch_fsdp2=True),
    "CP2": ParallelSizes(world_size=2, context_parallel_size=2),
    "CP2 EP2": ParallelSizes(world_size=2, context_parallel_size=2, expert_model_parallel_size=2),
}
MODELS = {
    "qwen3": ("one", "TP2", "PP2", "DP2", "FSDP2", "CP2"),
    "qwen3_moe": ("one", "TP2", "DP2 EP2", "CP2 EP2"),
    "deepseek_v3": ("one", "DP2 EP2", "CP2 EP2"),
}
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


def make_model(rank: int, sizes: ParallelSizes, folder: Path, dtype: torch.dtype = torch.float32) -> MegatronModel:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(sizes, dtype, optimizer={"lr": 1e-2, "clip_grad": 0.0})
    model = MegatronModel(read_architecture(checkpoint.config), options, rank, head="value")
    with torch.no_grad():
        for tensor in model.local_tensors().values():
            tensor.fill_(float("nan"))
    model.load_huggingface(checkpoint)
    return model


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
        model = make_model(rank, sizes, folder)
        batch, micro_batches, chosen = own_part(sizes)
        values, scores = model.values(batch, micro_batches), model.scores(batch, micro_batches)
        model.prepare_training(1)
        before = {key: tensor.detach().clone() for key, tensor in model.local_tensors().items()}
        step = model.train_step(batch, micro_batches, SquaredError())
        results[name] = {
            "chosen": chosen,
            "values": values,
            "scores": scores,
            "norm": step.gradient_norm,
            "moved": {key: not torch.equal(tensor, before[key]) for key, tensor in model.local_tensors().items()},
            "names": set(before),
        }
    return results


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
        batch = whole_batch()
        target = batch.fields["target"].split(batch.lengths.tolist())
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
            # No gradient moves the bias of experts, and no rate here.
            empty = {"value_head.weight"} if sizes == "FSDP2" and rank is ranks[1] else set()
            assert {
                key for key, moved in result["moved"].items() if not moved and not key.endswith("expert_bias")
            } == empty
            if result["values"] is None:
                continue
            seen |= set(result["chosen"])
            values = torch.cat([wanted["values"][index] for index in result["chosen"]])
            torch.testing.assert_close(result["values"], values, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(result["scores"], wanted["scores"][result["chosen"]], atol=TOLERANCE, rtol=0)
            assert result["values"].dtype == result["scores"].dtype == torch.float32
        assert seen == set(range(5))


def trained_with_and_without_fused_adam(rank: int, sizes: ParallelSizes, folder: Path) -> list[dict[str, Tensor]]:
    found = []
    for optimizers in (beside_fused_adam, nullcontext):
        model = make_model(rank, sizes, folder)
        batch, micro_batches, _ = own_part(sizes)
        with optimizers():
            model.prepare_training(2)
            for _ in range(2):
                model.train_step(batch, micro_batches, SquaredError())
        found.append({name: tensor.detach().clone() for name, tensor in model.local_tensors().items()})
    return found


def test_a_rank_without_the_head_updates_its_rows_in_the_optimizer_that_a_gpu_has(folders: Mapping[str, Path]) -> None:
    """Without elements, the head is the last of the tensors that its kernel is given."""
    for fused, plain in run_ranks(trained_with_and_without_fused_adam, SIZES["FSDP2"], folders["qwen3"]):
        for name, tensor in plain.items():
            torch.testing.assert_close(fused[name], tensor, atol=TOLERANCE, rtol=0)


def load_and_export(rank: int, sizes: ParallelSizes, folder: Path, exported: Path) -> dict[str, Tensor]:
    model = make_model(rank, sizes, folder)
    model.export_huggingface(exported, folder)
    return dict(model.local_tensors())


@pytest.mark.parametrize(("name", "sizes"), [("qwen3", "PP2"), ("qwen3_moe", "TP2")])
def test_an_export_is_the_classifier_that_was_loaded_and_transformers_reads_it(
    name: str, sizes: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    run_ranks(load_and_export, SIZES[sizes], folders[name], exported)
    original, written = load_file(folders[name] / "model.safetensors"), load_file(exported / "model.safetensors")
    assert original.keys() == written.keys()
    assert written["score.weight"].shape == (1, read_json(exported / "config.json")["hidden_size"])
    for key, tensor in original.items():
        assert torch.equal(tensor, written[key]), key
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    assert type(model).__name__ in read_json(exported / "config.json")["architectures"]
    assert torch.equal(model.score.weight, original["score.weight"])


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "deepseek_v3_mtp"])
def test_a_language_model_is_read_without_its_output_layer_and_its_values_begin_at_zero(
    name: str, language_models: Mapping[str, Path], tmp_path: Path
) -> None:
    folder, exported = language_models[name], tmp_path / "exported"
    (held,) = run_ranks(load_and_export, SIZES["one"], folder, exported)
    assert not held["value_head.weight"].any()
    assert not [key for key in held if "output_layer" in key or key.startswith("mtp.")]
    original, written = load_file(folder / "model.safetensors"), load_file(exported / "model.safetensors")
    assert written.keys() - original.keys() == {"score.weight"}
    for key in written.keys() & original.keys():
        assert torch.equal(written[key], original[key]), key
    config = read_json(exported / "config.json")
    assert [each.partition("For")[2] for each in config["architectures"]] == ["SequenceClassification"]
    again = run_ranks(load_and_export, SIZES["one"], exported, tmp_path / "again")[0]
    for key, tensor in held.items():
        assert torch.equal(tensor, again[key]), key


@pytest.fixture(scope="module")
def language_models(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Untied, tied, with soft-capped logits, and with multi-token prediction."""
    torch.manual_seed(5)
    gemma2 = tmp_path_factory.mktemp("gemma2")
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    Gemma2ForCausalLM(Gemma2Config(vocab_size=63, num_key_value_heads=2, head_dim=8, **fields)).save_pretrained(gemma2)
    return {
        "qwen3": tiny_models["qwen3"],
        "llama": tiny_models["llama"],
        "gemma2": gemma2,
        "deepseek_v3_mtp": with_prediction_layer(tiny_models["deepseek_v3"], tmp_path_factory.mktemp("mtp")),
    }


def with_prediction_layer(source: Path, folder: Path) -> Path:
    """The model with one more layer, for multi-token prediction, made of the last one."""
    config, tensors = read_json(source / "config.json"), load_file(source / "model.safetensors")
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    extra = {
        k.replace(f"layers.{last}.", f"layers.{last + 1}."): v.clone()
        for k, v in tensors.items()
        if f"layers.{last}." in k
    }
    prefix = f"model.layers.{last + 1}."
    extra |= {prefix + name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra[prefix + "eh_proj.weight"] = torch.ones(width, 2 * width)
    extra[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    extra[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        if path.name != "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


@pytest.mark.parametrize("ends", [2, [3, 2]])
def test_transformers_scores_a_text_at_the_token_that_ends_it_though_the_model_is_padded_with_that(
    ends: int | list[int], folders: Mapping[str, Path], tmp_path: Path
) -> None:
    """As SmolLM2 is; transformers would take the score of the token before, as if the end were padding."""
    given, exported = tmp_path / "given", tmp_path / "exported"
    shutil.copytree(folders["qwen3"], given)
    config = read_json(given / "config.json")
    (given / "config.json").write_text(json.dumps({**config, "eos_token_id": ends, "pad_token_id": 2}))
    run_ranks(load_and_export, SIZES["one"], given, exported)
    model, text = AutoModelForSequenceClassification.from_pretrained(exported), torch.tensor([[5, 9, 2]])
    with torch.no_grad():
        assert torch.equal(model(text).logits[0], model.score(model.model(text).last_hidden_state[0, -1]))


def test_a_classifier_of_several_labels_is_refused(folders: Mapping[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["qwen3"] / "model.safetensors")
    tensors["score.weight"] = torch.cat([tensors["score.weight"]] * 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["qwen3"] / "config.json").read_text())
    with pytest.raises(RuntimeError, match=r"UserError: .*score\.weight"):
        run_ranks(make_model, SIZES["one"], tmp_path)


def test_a_megatron_checkpoint_is_no_beginning_of_a_value_model(folders: Mapping[str, Path], tmp_path: Path) -> None:
    architecture = with_value_head(read_architecture(HuggingFaceCheckpoint(folders["qwen3"]).config))
    with pytest.raises(UserError, match="HuggingFace folder"):
        load_distributed([], architecture, tmp_path)
