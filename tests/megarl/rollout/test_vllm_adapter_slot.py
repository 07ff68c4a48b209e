"""The adapter alone in an engine's slot: what is sampled is PEFT's, after every refit of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Adapted, AdaptedByMerging
from engine_host import GREEDY, PROMPTS
from slots import (
    Slot,
    check_an_answer_over_two_adapters,
    check_greedy,
    check_that_an_update_that_breaks_off_leaves_nothing,
    check_that_no_key_or_value_outlives_its_adapter,
    long_prompt,
)

from converters.architectures import Lora, read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.rollout.protocol import Event, Request, RequestEnded, SamplingParameters, UpdateError
from megarl.schema import RolloutConfig

LORA = Lora(3, 12.0)
ATTENTION_AND_DOWN = Lora(9, 4.0, ("q_proj", "v_proj", "down_proj"))
ATTENTION = Lora(3, 12.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
LATENT_AND_ALL = Lora(
    3, 12.0, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
)
"""All of latent attention that has an adapter in vLLM, and all beside it."""
PARTS_OF_LATENT = Lora(9, 4.0, ("kv_a_proj_with_mqa", "shared_experts.up_proj", "o_proj"))
WITHOUT_LATENT_QUERY = Lora(3, 12.0, ("q_proj", "kv_a_proj_with_mqa", "down_proj"))
SHARING = ("deepseek_v3", "glm4_moe")
"""Models with shared experts, of which PEFT drops adapters."""
LONG = SamplingParameters(temperature=0, max_tokens=400)


@pytest.fixture
def adapted(model_folder: Callable[..., Path], tmp_path: Path) -> Adapted:
    return Adapted(model_folder("qwen3", 0), tmp_path, LORA)


def test_the_slot_is_filled_in_place(engines: Any, adapted: Adapted) -> None:
    slot = Slot(engines.start, adapted)
    first, second = adapted.tensors
    assert slot.engine.version() == -1
    with pytest.raises(UpdateError, match="commit a weight update before the first generation"):
        slot.engine.generate([Request(PROMPTS[0], GREEDY)])
    slot.update(0, first)
    check_greedy(slot, adapted, 0)
    slot.update(1, second)
    check_greedy(slot, adapted, 1)
    check_that_an_update_that_breaks_off_leaves_nothing(slot, adapted)
    check_that_no_key_or_value_outlives_its_adapter(slot, adapted, kept=32)
    check_that_answers_go_on_with_the_next_adapter(slot, adapted)


def check_that_answers_go_on_with_the_next_adapter(slot: Slot, adapted: Adapted) -> None:
    prompt, old = long_prompt(adapted), slot.engine.version()
    slot.engine.submit({1: Request(prompt, LONG)})
    told = slot.engine.events()
    # It has told of its first tokens.
    next(told)
    slot.update(old + 1, adapted.tensors[1])
    (end,) = next(ends for ends in map(only_ends, told) if ends)
    (turn,) = end.answer
    check_an_answer_over_two_adapters(adapted, prompt, turn, (old, old + 1))


def only_ends(told: list[Event]) -> list[RequestEnded]:
    return [each for each in told if isinstance(each, RequestEnded)]


@pytest.mark.parametrize("lora", [LORA, ATTENTION], ids=["all", "attention"])
def test_experts_have_their_adapters(
    engines: Any, model_folder: Callable[..., Path], tmp_path: Path, lora: Lora
) -> None:
    adapted = Adapted(model_folder("qwen3_moe", 0), tmp_path, lora)
    slot = Slot(engines.start, adapted)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)


@pytest.mark.parametrize(
    ("model", "fields", "lora"),
    [
        pytest.param("deepseek_v3", {}, LATENT_AND_ALL, marks=pytest.mark.long),
        pytest.param("deepseek_v3", {}, PARTS_OF_LATENT, marks=pytest.mark.long),
        pytest.param("deepseek_v3", {"q_lora_rank": None}, WITHOUT_LATENT_QUERY, marks=pytest.mark.long),
        pytest.param("glm4_moe", {}, LORA, marks=pytest.mark.long),
    ],
)
def test_latent_attention_and_shared_experts_have_their_adapters(
    engines: Any, tmp_path: Path, model: str, fields: dict[str, Any], lora: Lora
) -> None:
    adapted = AdaptedByMerging(write_tiny_model(model, tmp_path / "model", fields=fields), tmp_path, lora)
    slot = Slot(engines.start, adapted)
    for version, adapter in enumerate((0, 1, 0)):
        slot.update(version, adapted.tensors[adapter])
        check_greedy(slot, adapted, adapter)
    check_that_answers_go_on_with_the_next_adapter(slot, adapted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "lora", "arguments"),
    [
        ("llama", LORA, {}),
        ("qwen2", ATTENTION_AND_DOWN, {}),
        ("qwen3", ATTENTION_AND_DOWN, {}),
        ("qwen3_moe", LORA, {}),
        ("qwen3_moe", LORA, {"enable_expert_parallel": True}),
        ("qwen3_moe", ATTENTION_AND_DOWN, {}),
        ("deepseek_v3", LATENT_AND_ALL, {}),
        ("deepseek_v3", LATENT_AND_ALL, {"enable_expert_parallel": True}),
        ("deepseek_v3", PARTS_OF_LATENT, {}),
        ("glm4_moe", LORA, {}),
    ],
)
def test_tensor_parallel_ranks_have_their_parts(
    engines: Any, model_folder: Callable[..., Path], tmp_path: Path, model: str, lora: Lora, arguments: dict[str, Any]
) -> None:
    reference = AdaptedByMerging if model in SHARING else Adapted
    adapted = reference(model_folder(model, 0), tmp_path, lora)
    slot = Slot(engines.start, adapted, tensor_parallel_size=2, **arguments)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)


def completed(*adapted: str) -> dict[str, tuple[Any, ...]]:
    """Shapes of A and B of an expert's matrices, and whether they are zeros, of which some are `adapted`."""
    from vllm.lora.lora_weights import LoRALayerWeights

    from megarl.rollout.vllm import adapter_slot

    shapes = {"gate": ((3, 8), (6, 3)), "down": ((3, 6), (8, 3)), "up": ((3, 8), (6, 3))}
    loras = {name: LoRALayerWeights(name, 3, 12, *map(torch.ones, shapes[name])) for name in adapted}
    adapter_slot._complete(loras, list(shapes))
    return {
        name: (tuple(each.lora_a.shape), tuple(each.lora_b.shape), not each.lora_a.any() and not each.lora_b.any())
        for name, each in loras.items()
    }


@pytest.mark.parametrize("adapted", [("gate",), ("down",), ("gate", "up"), ("up", "down"), ()])
def test_what_of_an_expert_is_not_adapted_is_zeros(vllm_process: Any, adapted: tuple[str, ...]) -> None:
    of_gate, of_down = ((3, 8), (6, 3)), ((3, 6), (8, 3))
    shapes = {"gate": of_gate, "down": of_down, "up": of_gate} if adapted else {}
    assert vllm_process(completed, *adapted) == {name: (*each, name not in adapted) for name, each in shapes.items()}


REFUSED = {
    "transformers": (
        "qwen3",
        RolloutConfig(engine="transformers"),
        LORA,
        r"merge=false is not for rollout\.engine=transformers, .* take one of vllm, sglang",
    ),
    "codes": ("qwen3", RolloutConfig(weights="fp8_block"), LORA, r"rollout\.weights=fp8_block holds others"),
    "latent attention": (
        "deepseek_v3",
        RolloutConfig(),
        LORA,
        r"leave out that of kv_b_proj: .* without it in lora\.target_",
    ),
    "another family": ("mixtral", RolloutConfig(), LORA, "glm4_moe, and this is a mixtral model: set lora"),
    "rank": ("qwen3", RolloutConfig(), Lora(513, 1.0), "takes a rank of at most 512, and it is 513"),
    "stages": (
        "qwen3",
        RolloutConfig(engine_args={"pipeline_parallel_size": 2}),
        LORA,
        "parallel_size=2: leave",
    ),
    "no weights": ("qwen3", RolloutConfig(engine_args={"load_format": "dummy"}), LORA, "load_format=dummy: leave"),
    "drafts": (
        "glm4_moe",
        RolloutConfig(engine_args={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
        LORA,
        "speculative_config=.*: leave",
    ),
    "quantised": ("qwen3", RolloutConfig(engine_args={"quantization": "fp8"}), LORA, "quantization=fp8: leave"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_slot_is_refused(model_folder: Callable[..., Path], case: str) -> None:
    model, rollout, lora, says = REFUSED[case]
    with pytest.raises(UserError, match=says):
        with_adapter_slot(rollout, read_architecture(read_json(model_folder(model, 0) / CONFIG)), lora)
