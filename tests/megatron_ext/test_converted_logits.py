"""Every family, converted to a distributed checkpoint and loaded at any layout, computes what transformers does."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from distinct_vectors import with_distinct_vectors
from launch import run_ranks
from long_cases import but_long
from parallel_rank import parallel_rank
from parity import computed_logits, sequences
from safetensors.torch import load_file, save_file
from test_deepseek_models import MODELS as DEEPSEEK_MODELS
from test_deepseek_models import write_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from converters.architectures import FAMILIES, Architecture, read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.hf_to_megatron import convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from megarl.quickstart.tiny_models import add_prediction_layers
from megatron_ext.checkpoint.distributed_weights import load_distributed
from megatron_ext.model.model import build_model, local_tensors

DENSE_TOLERANCE, MOE_TOLERANCE = 1e-5, 1e-4

TP2_PP2_EP2 = ParallelSizes(
    world_size=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)
TP2_PP2 = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
# Stages are among the long ones: five families go over them in `test_distributed_weights.py`.
LAYOUTS = {
    "one": ParallelSizes(),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2 VPP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "TP2 PP2": TP2_PP2,
    "TP2 PP2 EP2": TP2_PP2_EP2,
}


@dataclass(frozen=True)
class Converted:
    """A model in both forms, and the logits of every micro-batch of `sequences` from transformers."""

    huggingface: Path
    megatron: Path
    architecture: Architecture
    expected: list[Tensor]


def convert(folder: Path, target: Path) -> Path:
    experts = read_architecture(HuggingFaceCheckpoint(folder).config).num_experts
    # Rows of padding beside those of the vocabulary, more than any of the layouts has.
    convert_checkpoint(
        folder,
        target,
        TP2_PP2_EP2 if experts else TP2_PP2,
        dtype="keep",
        vocabulary_multiple=16,
        workers=1,
        progress=lambda _done, _total: None,
    )
    return target


@pytest.fixture(scope="module")
def models(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Converted]:
    root = tmp_path_factory.mktemp("converted")
    folders = {name: root / name for name in tiny_models.keys() | DEEPSEEK_MODELS.keys()}
    for name, folder in folders.items():
        if name in DEEPSEEK_MODELS:
            write_model(name, folder)
        else:
            with_distinct_vectors(tiny_models[name], folder)
    folders["glm4_moe_mtp"] = glm_with_prediction_layer(folders["glm4_moe"], root / "glm4_moe_mtp")
    return {name: converted(folder, root / f"{name}-megatron") for name, folder in folders.items()}


def glm_with_prediction_layer(source: Path, target: Path) -> Path:
    with_distinct_vectors(source, target)
    config = {**json.loads((target / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    add_prediction_layers(target, std=0.15)
    return target


def converted(folder: Path, target: Path) -> Converted:
    config = HuggingFaceCheckpoint(folder).config
    # transformers does not know kimi_k2, which is DeepSeek-V3 by another name.
    known = AutoConfig.for_model(**{**config, "model_type": config["model_type"].replace("kimi_k2", "deepseek_v3")})
    # Only its eager attention soft-caps.
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=known, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = [torch.cat([model(tokens[None]).logits[0] for tokens in batch]) for batch in sequences()]
    return Converted(folder, convert(folder, target), read_architecture(config), expected)


def logits_of_each(
    rank: int, sizes: ParallelSizes, checkpoints: Mapping[str, tuple[Path, Path]]
) -> dict[str, tuple[int, list[Tensor]]]:
    """By name, this rank's tensor-parallel rank and its columns of the logits; every weight starts as NaN."""
    results = {}
    for name, (huggingface, megatron) in checkpoints.items():
        architecture = read_architecture(HuggingFaceCheckpoint(huggingface).config)
        chunks = build_model(architecture, sizes, params_dtype=torch.float32)
        with torch.no_grad():
            for tensor in local_tensors(chunks).values():
                tensor.fill_(float("nan"))
        load_distributed(chunks, architecture, megatron)
        if untouched := [key for key, tensor in local_tensors(chunks).items() if tensor.isnan().any()]:
            raise AssertionError(f"{name}: {untouched} are not loaded")
        results[name] = parallel_rank().tensor, computed_logits(chunks, sizes)
    return results


def whole_logits(sizes: ParallelSizes, checkpoints: Mapping[str, tuple[Path, Path]]) -> dict[str, list[list[Tensor]]]:
    """By name, the logits of every micro-batch as each data-parallel rank has them."""
    results = run_ranks(logits_of_each, sizes, checkpoints)
    parts = sizes.tensor_model_parallel_size
    whole: dict[str, list[list[Tensor]]] = {}
    for name in checkpoints:
        last_stage = [result[name] for result in results if result[name][1]]
        replicas = [
            sorted(last_stage[i : i + parts], key=lambda part: part[0]) for i in range(0, len(last_stage), parts)
        ]
        whole[name] = [
            [torch.cat(columns, dim=1) for columns in zip(*(batches for _, batches in replica), strict=True)]
            for replica in replicas
        ]
    return whole


def error(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference; columns beyond those expected are padding."""
    return max(
        float((ours[:, : theirs.shape[1]] - theirs).abs().max()) for ours, theirs in zip(got, expected, strict=True)
    )


def test_every_family_is_among_the_models(models: Mapping[str, Converted]) -> None:
    found = {HuggingFaceCheckpoint(model.huggingface).config["model_type"] for model in models.values()}
    assert found == set(FAMILIES)


def is_possible(architecture: Architecture, sizes: ParallelSizes) -> bool:
    if sizes.expert_model_parallel_size > 1 and not architecture.num_experts:
        return False
    tied = architecture.gpt_model["share_embeddings_and_output_weights"]
    return sizes.pipeline_model_parallel_size == 1 or not (tied and architecture.mtp_layers)


@pytest.mark.parametrize("layout", but_long(LAYOUTS, "one", "PP2 VPP2", "TP2 PP2", "TP2 PP2 EP2"))
def test_logits_equal_those_of_transformers(layout: str, models: Mapping[str, Converted]) -> None:
    sizes = LAYOUTS[layout]
    possible = {name: model for name, model in models.items() if is_possible(model.architecture, sizes)}
    got = whole_logits(sizes, {name: (model.huggingface, model.megatron) for name, model in possible.items()})
    errors = {name: max(error(replica, model.expected) for replica in got[name]) for name, model in possible.items()}
    tolerances = {
        name: MOE_TOLERANCE if model.architecture.num_experts else DENSE_TOLERANCE for name, model in possible.items()
    }
    assert {name: each for name, each in errors.items() if not each <= tolerances[name]} == {}


def test_tied_embeddings_with_multi_token_prediction_over_stages_are_refused(models: Mapping[str, Converted]) -> None:
    model = models["deepseek_v3_mtp_tied"]
    with pytest.raises(RuntimeError, match=r"UserError: .*tied embeddings over 2 pipeline stages"):
        run_ranks(logits_of_each, LAYOUTS["PP2 VPP2"], {"tied": (model.huggingface, model.megatron)})


def renamed(source: Path, target: Path, names: Mapping[str, str]) -> Path:
    """A copy in which tensors have each other's names: converting it is converting `source` by a wrong map."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    pattern = re.compile("|".join(map(re.escape, names)))
    tensors = load_file(source / "model.safetensors")
    wrong = {pattern.sub(lambda found: names[found[0]], name): tensor for name, tensor in tensors.items()}
    save_file(wrong, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_wrong_maps_show(models: Mapping[str, Converted], tmp_path: Path) -> None:
    swapped = {".gate_proj.": ".up_proj.", ".up_proj.": ".gate_proj."}
    shifted = {f".experts.{expert}.": f".experts.{(expert + 1) % 4}." for expert in range(4)}
    wrong = {
        "gate and up swapped": ("llama", swapped),
        "gate and up of the experts swapped": ("qwen3_moe", swapped),
        "experts shifted by one": ("qwen3_moe", shifted),
    }
    checkpoints = {}
    for mistake, (name, names) in wrong.items():
        folder = renamed(models[name].huggingface, tmp_path / mistake, names)
        checkpoints[mistake] = folder, convert(folder, tmp_path / f"{mistake}-megatron")
    for mistake, (got,) in whole_logits(LAYOUTS["one"], checkpoints).items():
        assert error(got, models[wrong[mistake][0]].expected) > 100 * MOE_TOLERANCE, mistake
