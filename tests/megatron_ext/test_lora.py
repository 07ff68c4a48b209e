"""Adapters are those of PEFT, however the model is cut: log-probs, gradients and their norm, merged weights."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from launch import run_ranks
from long_cases import but_long
from parallel_rank import parallel_rank
from parity import sequences
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import Architecture, Lora, adapter_architecture, read_architecture
from converters.architectures.lora import base_name
from converters.copying import check_distributed, copy_transfers
from converters.errors import UserError
from converters.formats.peft import (
    ADAPTER_CONFIG,
    AdapterFolder,
    create_adapter,
    finish_adapter,
    read_adapter_config,
)
from converters.formats.safetensors import HuggingFaceCheckpoint, open_for_writing, partial_folder
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megarl.algorithms import SftObjective
from megarl.config.lora import without_dropout
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import LoraConfig
from megatron_ext import device, megatron_model
from megatron_ext.checkpoint import checkpoint
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import AdapterOptions, MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

MIXTURES = ("qwen3_moe", "deepseek_v3")
SIZES = {
    # Only here two groups of query, key and value are on one rank.
    "1 rank": (ParallelSizes(), ("qwen3",)),
    "TP2 PP2 EP2": (
        ParallelSizes(
            world_size=4,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
        ),
        MIXTURES,
    ),
    "TP2 EP2 ETP2": (
        ParallelSizes(world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2),
        MIXTURES,
    ),
    "TP1 ETP2": (ParallelSizes(world_size=2, expert_tensor_parallel_size=2), ("qwen3_moe",)),
}
LORAS = {
    "qwen3": Lora(3, 12.0),
    # Query, key and value are one layer of Megatron's, gate and up another: not all of their matrices are adapted.
    "qwen3_moe": Lora(3, 12.0, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": Lora(3, 12.0, ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj")),
}
EXPORTED = "TP2 PP2 EP2"
"""The ranks that also export, save and go on: without data parallelism every rank has all its gradients."""
EXPORTED_MODEL = "deepseek_v3"
BATCH = sequences()[0]


@dataclass(frozen=True)
class Case:
    """A model, an adapter of it on disk, and what both give together in HuggingFace transformers."""

    folder: Path
    adapter: Path
    lora: Lora
    factors: Mapping[str, Tensor]
    log_probs: list[Tensor]
    gradients: Mapping[str, Tensor]


def architecture_of(folder: Path) -> Architecture:
    return read_architecture(HuggingFaceCheckpoint(folder).config)


def write_adapter(folder: Path, architecture: Architecture, lora: Lora) -> Mapping[str, Tensor]:
    """An adapter whose A and B are all random, so that each has a gradient."""
    adapter, partial = adapter_architecture(architecture, lora), partial_folder(folder)
    create_adapter(partial, adapter.hf_shapes, torch.float32)
    generator = torch.Generator().manual_seed(5)
    views = open_for_writing(partial)
    for view in views.values():
        view.copy_(0.1 * torch.randn(view.shape, generator=generator))
    factors = {name: view.clone() for name, view in views.items()}
    finish_adapter(partial, folder, adapter, lora)
    return factors


def matrix(of_parameter: Callable[[str], Tensor], name: str) -> Tensor:
    """A matrix by its name in a checkpoint, from transformers' parameters, in which all experts are one."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return of_parameter(name)
    experts, expert, projection = found[1], int(found[2]), found[3]
    if projection == "down":
        return of_parameter(f"{experts}.down_proj")[expert]
    return of_parameter(f"{experts}.gate_up_proj")[expert].chunk(2)[projection == "up"]


def hf_log_probs(model: Any) -> list[Tensor]:
    """By sequence; 0 for the first token."""
    found = []
    for tokens in BATCH:
        logits = model(tokens[None]).logits[0].log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), logits[:-1].gather(1, tokens[1:, None])[:, 0]]))
    return found


def in_transformers(folder: Path, lora: Lora, factors: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs with W + s B A in place of W; gradients of their negative sum, dA = s B' dW and dB = s dW A'."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = {name: name.replace("lora_A", "lora_B") for name in factors if "lora_A" in name}
    with torch.no_grad():
        for a, b in pairs.items():
            matrix(model.get_parameter, base_name(a)).add_(lora.scale * factors[b] @ factors[a])
    log_probs = hf_log_probs(model)
    (-torch.cat(log_probs).sum()).backward()
    gradients = {}
    for a, b in pairs.items():
        of_weight = matrix(lambda name: model.get_parameter(name).grad, base_name(a))
        gradients[a] = lora.scale * factors[b].T @ of_weight
        gradients[b] = lora.scale * of_weight @ factors[a].T
    return [each.detach() for each in log_probs], gradients


@pytest.fixture(scope="module")
def cases(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Case]:
    made = {}
    for name, lora in LORAS.items():
        adapter = tmp_path_factory.mktemp("adapters") / name
        factors = write_adapter(adapter, architecture_of(tiny_models[name]), lora)
        made[name] = Case(tiny_models[name], adapter, lora, factors, *in_transformers(tiny_models[name], lora, factors))
    return made


def train(rank: int, sizes: ParallelSizes, cases: Mapping[str, Case], exported: Path | None) -> dict[str, Any]:
    """By model: log-probs of this rank's sequences, its share of the gradients by HuggingFace names, their norm."""
    return {
        name: train_one(rank, sizes, case, exported if name == EXPORTED_MODEL else None) for name, case in cases.items()
    }


def train_one(rank: int, sizes: ParallelSizes, case: Case, exported: Path | None) -> dict[str, Any]:
    mine = list(range(len(BATCH)))[parallel_rank().data :: sizes.data_parallel_size]
    tokens = torch.cat([BATCH[each] for each in mine])
    lengths = torch.tensor([len(BATCH[each]) for each in mine])
    batch = RaggedBatch(tokens, lengths, {"weights": torch.ones(len(tokens))})
    micro_batches = [list(range(len(mine)))]
    options = MegatronOptions(
        sizes,
        torch.float32,
        optimizer={"lr": 1e-3, "clip_grad": 0.0},
        # Data-parallel ranks have all gradients only without it.
        distributed={"use_distributed_optimizer": sizes.data_parallel_size == 1},
        adapter=AdapterOptions(case.lora, path=case.adapter),
    )
    model = begin(options, rank, case)
    before = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    if exported:
        model.export_huggingface(exported / "merged", case.folder)
        model.export_adapter(exported / "adapter")
    predictions = model.log_probs(batch, micro_batches, temperature=1.0)
    model.prepare_training(2)
    norm = model.train_step(batch, micro_batches, SftObjective()).gradient_norm
    assert model.adapters is not None
    adapters = model.adapters.tensors
    frozen = all(
        torch.equal(tensor, before[name]) for name, tensor in model.local_tensors().items() if name not in adapters
    )
    architecture = adapter_architecture(model.architecture, case.lora)
    shares = {name: torch.zeros(shape) for name, shape in architecture.hf_shapes.items()}
    source = megatron_layout(architecture, sizes, module_names="local")
    transfers = [each for each in plan(source, huggingface_layout(architecture.hf_shapes)) if each.source_rank == rank]
    copy_transfers(transfers, {name: tensor.main_grad for name, tensor in adapters.items()}, shares)  # type: ignore[attr-defined]
    resumed = exported is None or goes_on_bit_for_bit(
        model, begin(replace(options, adapter=AdapterOptions(case.lora)), rank, case), batch, exported / "checkpoint"
    )
    found = {} if predictions is None else dict(zip(mine, predictions.log_probs.split(lengths.tolist()), strict=True))
    return {"log_probs": found, "gradients": shares, "norm": norm, "frozen": frozen, "resumed": resumed}


def begin(options: MegatronOptions, rank: int, case: Case) -> MegatronModel:
    model = MegatronModel(architecture_of(case.folder), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(case.folder))
    model.add_adapters()
    return model


def goes_on_bit_for_bit(model: MegatronModel, other: MegatronModel, batch: RaggedBatch, folder: Path) -> bool:
    """Whether another model that loads the checkpoint of this one makes the same step, and only adapters are in it."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(model, folder)
    other.prepare_training(2)
    checkpoint.load(other, folder)
    micro_batches = [list(range(len(batch.lengths)))]
    norms = [each.train_step(batch, micro_batches, SftObjective()).gradient_norm for each in (model, other)]
    assert model.adapters is not None
    assert other.adapters is not None
    ours, theirs = model.adapters.tensors, other.adapters.tensors
    alike = all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    keys = [key for key in TorchDistCheckpoint(folder).weights if "_lora." not in key]
    return alike and norms[0] == norms[1] and not keys


@pytest.mark.parametrize("name", but_long(SIZES, "TP2 EP2 ETP2"))
def test_adapted_models_are_the_same_however_they_are_cut(name: str, cases: Mapping[str, Case], tmp_path: Path) -> None:
    sizes, models = SIZES[name]
    exported = tmp_path if name == EXPORTED else None
    cut = {model: cases[model] for model in models}
    ranks = run_ranks(train, sizes, cut, exported)
    for model, case in cut.items():
        results = [rank[model] for rank in ranks]
        log_probs = {index: found for result in results for index, found in result["log_probs"].items()}
        assert sorted(log_probs) == list(range(len(BATCH)))
        for index, expected in enumerate(case.log_probs):
            torch.testing.assert_close(log_probs[index], expected, atol=1e-5, rtol=0)
        for hf_name, whole in case.gradients.items():
            got = torch.stack([result["gradients"][hf_name] for result in results]).sum(0)
            scale = max(1.0, float(whole.abs().max()))
            torch.testing.assert_close(
                got / scale, whole / scale, atol=1e-5, rtol=0, msg=lambda text, n=hf_name: f"{n}: {text}"
            )
        norm = float(torch.stack([each.pow(2).sum() for each in case.gradients.values()]).sum().sqrt())
        for result in results:
            assert result["norm"] == pytest.approx(norm, rel=1e-4)
            assert result["frozen"]
            assert result["resumed"]
    if exported:
        check_export(exported, cut[EXPORTED_MODEL])


def check_export(exported: Path, case: Case) -> None:
    with pytest.raises(UserError, match="checkpoint holds an adapter alone"):
        check_distributed(TorchDistCheckpoint(exported / "checkpoint"), architecture_of(case.folder))
    merged = AutoModelForCausalLM.from_pretrained(exported / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        for got, expected in zip(hf_log_probs(merged), case.log_probs, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (exported / "adapter" / file).read_bytes() == (case.adapter / file).read_bytes()


def test_a_merge_that_has_no_room_leaves_the_weights_as_they_were(cases: Mapping[str, Case]) -> None:
    assert run_ranks(changed_by_a_merge_without_room, SIZES["1 rank"][0], cases["qwen3"]) == [[]]


def changed_by_a_merge_without_room(rank: int, sizes: ParallelSizes, case: Case) -> list[str]:
    model = begin(
        MegatronOptions(sizes, torch.float32, adapter=AdapterOptions(case.lora, path=case.adapter)), rank, case
    )
    before = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    full = MemoryError("the host has no room")
    with (
        mock.patch.object(device, "host_memory", side_effect=full),
        pytest.raises(MemoryError),
        model.trained_weights(),
    ):
        pass
    return [name for name, tensor in model.local_tensors().items() if not torch.equal(tensor, before[name])]


def test_copies_of_merged_weights_share_pieces_of_host_memory(cases: Mapping[str, Case]) -> None:
    found = run_ranks(asked_by_merges, SIZES["1 rank"][0], cases["qwen3"])
    assert found == [([device.HOST_BUCKET_BYTES], [])]


def asked_by_merges(rank: int, sizes: ParallelSizes, case: Case) -> tuple[list[int], list[str]]:
    """Bytes of each piece of host memory, and the weights that are not as they were before.

    Weights are merged one by one, as by the buckets of a refit, then all at once.
    """
    model = begin(
        MegatronOptions(sizes, torch.float32, adapter=AdapterOptions(case.lora, path=case.adapter)), rank, case
    )
    before = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    with mock.patch.object(device, "host_memory", side_effect=device.host_memory) as host_memory:
        for names in (*({name} for name in before), None):
            with model.trained_weights(names):
                pass
    changed = [name for name, tensor in model.local_tensors().items() if not torch.equal(tensor, before[name])]
    return [call.args[0] for call in host_memory.call_args_list], changed


def test_ranks_without_adapters_export_with_those_that_have_some(tmp_path: Path) -> None:
    # The first of the two layers, and so of the two stages, has no experts.
    folder = write_tiny_model("deepseek_v3", tmp_path / "model")
    given, lora = tmp_path / "given", Lora(3, 12.0, ("shared_experts.up_proj",))
    write_adapter(given, architecture_of(folder), lora)
    sizes = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
    assert run_ranks(exported_again, sizes, folder, lora, given, tmp_path / "exported") == [0, 2]
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "exported" / file).read_bytes() == (given / file).read_bytes()


def exported_again(rank: int, sizes: ParallelSizes, folder: Path, lora: Lora, given: Path, exported: Path) -> int:
    """How many tensors of the adapter this rank has."""
    options = MegatronOptions(sizes, torch.float32, adapter=AdapterOptions(lora, path=given))
    model = MegatronModel(architecture_of(folder), options, rank)
    model.add_adapters()
    model.export_adapter(exported)
    assert model.adapters is not None
    return len(model.adapters.tensors)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_peft_gives_the_same_log_probs(name: str, cases: Mapping[str, Case]) -> None:
    peft = pytest.importorskip("peft")
    case = cases[name]
    base = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, case.adapter, is_trainable=True).eval()
    log_probs = hf_log_probs(model)
    for got, expected in zip(log_probs, case.log_probs, strict=True):
        torch.testing.assert_close(got.detach(), expected, atol=1e-5, rtol=0)
    (-torch.cat(log_probs).sum()).backward()
    compared = 0
    for hf_name, expected in case.gradients.items():
        # Experts' A and B are one parameter for all in PEFT.
        if ".experts." not in hf_name:
            got = model.get_parameter(hf_name.replace(".weight", ".default.weight")).grad
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(got / scale, expected / scale, atol=1e-5, rtol=0)
            compared += 1
    assert compared >= 6 * 4


def test_adapters_that_cannot_be_are_refused_in_a_sentence(cases: Mapping[str, Case], tmp_path: Path) -> None:
    architecture = architecture_of(cases["qwen3"].folder)
    with pytest.raises(UserError, match=r"names qproj, which is no linear layer of this qwen3 model: .*mean q_proj"):
        adapter_architecture(architecture, Lora(4, 8.0, ("qproj",)))
    with pytest.raises(UserError, match="is no adapter of these matrices of this qwen3 model: it lacks"):
        AdapterFolder(cases["qwen3_moe"].adapter).check(architecture, Lora(3, 12.0))
    with pytest.raises(UserError, match=r"has rank 3 and alpha 12, and lora\.rank=4"):
        AdapterFolder(cases["qwen3"].adapter).check(architecture, Lora(4, 12.0))
    other = read_architecture({**architecture.hf_config, "head_dim": 16})
    with pytest.raises(UserError, match=r"with shape \[128, 3\], where the model has \[64, 3\]"):
        AdapterFolder(cases["qwen3"].adapter).check(other)
    written = json.loads((cases["qwen3"].adapter / ADAPTER_CONFIG).read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora=True, which plain LoRA has not: merge it"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA', and only 'LORA' is supported: merge it"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens="),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"of_the_future": {"x": 1}}, "of_the_future={'x': 1}"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4', and .* save it as plain LoRA"),
        ({"r": "8"}, "r='8'"),
        ({"target_modules": ".*_proj"}, "no list of names"),
        ({"r": 0}, "must be above 0"),
    ):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**written, **change}))
        with pytest.raises(UserError, match=words):
            read_adapter_config(tmp_path)


def test_modules_that_take_no_adapters_are_refused_before_weights_are_read(
    cases: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(transformer_impl="transformer_engine")
    monkeypatch.setattr(megatron_model, "build_model", lambda *_, **__: [SimpleNamespace(config=config)])
    options = MegatronOptions(ParallelSizes(), torch.bfloat16, adapter=AdapterOptions(Lora(3, 12.0)))
    with pytest.raises(UserError, match=r"Transformer Engine's modules: set megatron\.transformer_impl=local"):
        MegatronModel(architecture_of(cases["qwen3"].folder), options, 0)


def test_an_adapter_with_the_fields_that_peft_writes_is_plain(cases: Mapping[str, Case], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for options in ({}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": False, "lora_dropout": 0.1}):
        peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj"], **options).save_pretrained(tmp_path)
        assert read_adapter_config(tmp_path) == Lora(3, 12.0, ("q_proj",))
    assert "lora_dropout=0.1, and goes on without dropout" in str(without_dropout(LoraConfig(path=str(tmp_path))))
    assert without_dropout(LoraConfig(path=str(cases["qwen3"].adapter))) is None
    assert without_dropout(LoraConfig()) is None
