"""The adapter alone in the slot of an SGLang engine: over a server with SGLang's rules, and over SGLang's own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import Adapted, AdaptedByMerging, AdaptedStandIn
from engine_host import GREEDY, PROMPTS
from sglang_rules import RULES_OF_SLOTS
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
from megarl.rollout.protocol import Request, SamplingParameters, UpdateError
from megarl.rollout.sglang.adapter_arguments import LORA_ALPHA
from megarl.rollout.sglang.adapter_slot import AdapterSlot, module_of, zeros_beside
from megarl.rollout.sglang.arguments import server_arguments
from megarl.rollout.sglang.kind import SGLANG
from megarl.schema import RolloutConfig

LORA = Lora(3, 12.0)
PARTS = [
    ("q_proj", "down_proj"),
    ("k_proj", "up_proj"),
    ("v_proj", "o_proj", "gate_proj"),
]
"""Modules of which some are together with others that have no adapter."""
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
PARTS_OF_LATENT = [("q_a_proj", "down_proj"), ("kv_a_proj_with_mqa", "shared_experts.up_proj"), ("kv_b_proj",)]
MODEL = "base_model.model.model.layers.0"


def test_the_slot_over_a_server_with_the_rules_is_filled_in_place(
    start_stand_in: Any, model_folder: Callable[..., Path], tmp_path: Path, pool: Any
) -> None:
    adapted = AdaptedStandIn(model_folder("qwen3", 0), tmp_path / "all", LORA)
    slot = Slot(start_stand_in, adapted, "sglang")
    check_slot(slot, adapted, pool)
    check_parts(slot, adapted, tmp_path)


@pytest.mark.sglang
def test_the_slot_of_its_own_server_is_filled_in_place(
    sglang_engines: Any, model_folder: Callable[..., Path], tmp_path: Path, pool: Any
) -> None:
    adapted = Adapted(model_folder("qwen3", 0), tmp_path / "all", LORA)
    slot = Slot(sglang_engines.start, adapted, "sglang")
    check_slot(slot, adapted, pool)
    check_parts(slot, adapted, tmp_path)
    check_that_no_key_or_value_outlives_its_adapter(slot, adapted, kept=39)
    slot.engine.sleep()
    slot.engine.wake_up(["weights", "kv_cache"])
    check_greedy(slot, adapted, 0)


def check_slot(slot: Slot, adapted: Adapted, pool: Any) -> None:
    engine = slot.engine
    assert engine.version() == -1
    with pytest.raises(UpdateError, match="commit a weight update before the first generation"):
        engine.generate([Request(PROMPTS[0], GREEDY)])
    for version, tensors in enumerate(adapted.tensors):
        slot.update(version, tensors)
        check_greedy(slot, adapted, version)
    check_that_an_update_that_breaks_off_leaves_nothing(slot, adapted)
    check_that_no_matrix_is_left_out(slot, adapted)
    for rule in RULES_OF_SLOTS.values():
        rule(engine)
    check_that_answers_go_on_with_the_next_adapter(slot, adapted, pool)


def check_parts(slot: Slot, adapted: Adapted, folder: Path, parts: Sequence[tuple[str, ...]] = tuple(PARTS)) -> None:
    for number, part in enumerate(parts):
        of_part = type(adapted)(adapted.model, folder / str(number), Lora(3, 12.0, part))
        slot.update(slot.engine.version() + 1, of_part.tensors[0])
        check_greedy(slot, of_part, 0)


def check_that_no_matrix_is_left_out(slot: Slot, adapted: Adapted) -> None:
    new, tensors = slot.engine.version() + 1, adapted.tensors[0]
    surplus = {f"{MODEL}.mlp.router.lora_{factor}.weight": torch.ones(3, 3) for factor in "AB"}
    slot.begin(new, {**tensors, **surplus})
    slot.write({**tensors, **surplus})
    with pytest.raises(
        UpdateError, match=r"does not go into SGLang's slot: .* no place for .*router\.lora_A\.weight, one of 2"
    ):
        slot.engine.commit_update(new)
    # Nor is one left from an update that breaks off.
    slot.begin(new, {**tensors, **surplus})
    slot.write(surplus)
    slot.update(new, tensors)
    check_greedy(slot, adapted, 0)


def check_that_answers_go_on_with_the_next_adapter(slot: Slot, adapted: Adapted, pool: Any) -> None:
    engine, prompt, old = slot.engine, long_prompt(adapted), slot.engine.version()
    engine.pause("keep")
    long = pool.submit(engine.generate, [Request(prompt, SamplingParameters(temperature=0, max_tokens=400))])
    behind = pool.submit(engine.generate, [Request(prompt, SamplingParameters(temperature=0, max_tokens=8))])
    while len(engine._in_flight._waiting) < 2:
        assert not long.done()
    engine.resume()
    behind.result(60)
    slot.update(old + 1, adapted.tensors[1])
    ((turn,),) = long.result(60)
    check_an_answer_over_two_adapters(adapted, prompt, turn, (old, old + 1))


@pytest.mark.sglang
def test_experts_have_their_adapters(sglang_engines: Any, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    adapted = Adapted(model_folder("qwen3_moe", 0), tmp_path, LORA)
    slot = Slot(sglang_engines.start, adapted, "sglang")
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)
    check_parts(slot, AdaptedByMerging(adapted.model, tmp_path / "merged", LORA), tmp_path)


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "fields", "parts", "workers"),
    [
        ("deepseek_v3", {}, PARTS_OF_LATENT, 1),
        ("deepseek_v3", YARN, PARTS_OF_LATENT, 2),
        ("glm4_moe", {}, PARTS, 2),
    ],
)
def test_latent_attention_and_shared_experts_have_their_adapters(
    sglang_engines: Any,
    tmp_path: Path,
    model: str,
    fields: dict[str, Any],
    parts: list[tuple[str, ...]],
    workers: int,
) -> None:
    folder = write_tiny_model(model, tmp_path / "model", seed=0, fields=fields)
    adapted = AdaptedByMerging(folder, tmp_path, LORA)
    slot = Slot(sglang_engines.start, adapted, "sglang", tp_size=workers)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)
    check_parts(slot, adapted, tmp_path / "parts", parts)


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_moe"])
def test_tensor_parallel_ranks_have_their_parts(sglang_engines: Any, tmp_path: Path, model: str) -> None:
    folder = write_tiny_model(model, tmp_path / "model", seed=0, fields={"num_key_value_heads": 2})
    adapted = Adapted(folder, tmp_path, LORA)
    slot = Slot(sglang_engines.start, adapted, "sglang", tp_size=2)
    for version in range(2):
        slot.update(version, adapted.tensors[version])
        check_greedy(slot, adapted, version)


def adapter_of(*modules: str) -> dict[str, torch.Tensor]:
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "gate_proj": 12, "up_proj": 12}
    return {
        f"{MODEL}.{module}.lora_{factor}.weight": torch.ones(*((3, 6) if factor == "A" else (rows[module], 3)))
        for module in modules
        for factor in "AB"
    }


@pytest.mark.parametrize(
    ("adapted", "absent"),
    [
        (("q_proj",), ("k_proj", "v_proj")),
        (("v_proj",), ("q_proj", "k_proj")),
        (("q_proj", "v_proj"), ("k_proj",)),
        (("q_proj", "k_proj", "v_proj"), ()),
        (("up_proj",), ("gate_proj",)),
        (("gate_proj",), ("up_proj",)),
    ],
)
def test_what_is_not_adapted_beside_what_is_becomes_zeros(adapted: tuple[str, ...], absent: tuple[str, ...]) -> None:
    found = zeros_beside(adapter_of(*adapted), {"q_proj": 8, "k_proj": 4, "v_proj": 4})
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        name: tuple(each.shape) for name, each in adapter_of(*absent).items()
    }
    assert not any(each.any() for each in found.values())


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("self_attn.k_proj", "self_attn.qkv_proj"),
        ("self_attn.o_proj", "self_attn.o_proj"),
        ("mlp.up_proj", "mlp.gate_up_proj"),
        ("mlp.experts.12.up_proj", "mlp.experts"),
        ("mlp.experts.0.down_proj", "mlp.experts"),
        ("mlp.shared_experts.down_proj", "mlp.shared_experts.down_proj"),
    ],
)
def test_every_matrix_has_its_module(name: str, module: str) -> None:
    assert module_of(f"{MODEL}.{name}.lora_B.weight") == f"model.layers.0.{module}"


def test_what_sglang_refuses_ends_the_update() -> None:
    refused = SimpleNamespace(success=False, error_message="already loaded")
    manager = SimpleNamespace(
        lora_refs={"1": SimpleNamespace(lora_id="1")},
        configs={"1": SimpleNamespace(hf_config={})},
        lora_modules=[{"model.layers.0.gate_up_proj": None}],
        unload_lora_adapter=lambda _: refused,
    )
    slot = AdapterSlot(manager)
    slot.keep(adapter_of("gate_proj").items())
    with pytest.raises(UpdateError, match="slot: already loaded"):
        slot.fill()


def test_the_server_is_given_none_but_its_own_arguments(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen3", 0)
    given = with_adapter_slot(RolloutConfig(engine="sglang"), read_architecture(read_json(folder / CONFIG)), LORA)
    assert given[LORA_ALPHA] == LORA.alpha
    arguments = server_arguments(folder, given, 1, "key")
    assert LORA_ALPHA not in arguments
    assert (arguments["enable_lora"], arguments["lora_strict_loading"], arguments["weight_version"]) == (
        True,
        True,
        "-1",
    )
    for name, value in (("enable_lora", True), ("lora_paths", ["folder"])):
        with pytest.raises(UserError, match=f"{name}.*the adapter that is trained"):
            SGLANG.check({name: value})


REFUSED = {
    "another family": ("mixtral", {}, "has been compared for llama, .* and this is a mixtral model: set lora.merge"),
    "no weights": ("qwen3", {"load_format": "dummy"}, "load_format=dummy: leave it out"),
    "a head for two workers": ("qwen2", {"tp_size": 2}, "tp_size=2 cuts 1: set that to a divisor"),
    "expert parallelism": ("qwen3", {"ep_size": 2}, "ep_size=2: leave it out"),
    "fused shared experts": (
        "glm4_moe",
        {"disable_shared_experts_fusion": False},
        "disable_shared_experts_fusion=False: leave it out",
    ),
    "a runner of experts that takes none": (
        "qwen3_moe",
        {"moe_runner_backend": "deep_gemm"},
        "moe_runner_backend=deep_gemm: leave it out",
    ),
}


def slot_arguments(folder: Path, lora: Lora) -> Mapping[str, Any]:
    return with_adapter_slot(RolloutConfig(engine="sglang"), read_architecture(read_json(folder / CONFIG)), lora)


def test_shared_experts_stay_apart_and_no_prefix_gets_adapters_of_others(model_folder: Callable[..., Path]) -> None:
    keys = ("disable_shared_experts_fusion", "disable_chunked_prefix_cache")
    found = {
        (model, part): [slot_arguments(model_folder(model, 0), Lora(3, 12.0, (part,))).get(key) for key in keys]
        for model, part in [("qwen3_moe", "o_proj"), ("glm4_moe", "o_proj"), ("deepseek_v3", "kv_b_proj")]
    }
    assert list(found.values()) == [[None, None], [True, None], [True, True]]


def test_experts_that_may_have_adapters_are_computed_by_the_runner_that_takes_them(
    model_folder: Callable[..., Path],
) -> None:
    found = {
        (model, part): slot_arguments(model_folder(model, 0), Lora(3, 12.0, (part,))).get("moe_runner_backend")
        for model, part in [
            ("qwen3_moe", "all-linear"),
            ("qwen3_moe", "up_proj"),
            ("deepseek_v3", "shared_experts.down_proj"),
            ("qwen3_moe", "o_proj"),
            ("qwen3", "down_proj"),
        ]
    }
    assert list(found.values()) == ["triton", "triton", "triton", None, None]


def test_matrices_of_queries_without_a_latent_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model("deepseek_v3", tmp_path / "model", fields={"q_lora_rank": None})
    with pytest.raises(
        UserError, match=r"no place for that of kv_a_proj_with_mqa and q_proj in .* lora\.target_modules"
    ):
        slot_arguments(folder, LORA)
    assert slot_arguments(folder, Lora(3, 12.0, ("o_proj",)))["lora_target_modules"] == ["o_proj"]


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_slot_is_refused(model_folder: Callable[..., Path], case: str) -> None:
    model, arguments, says = REFUSED[case]
    rollout = RolloutConfig(engine="sglang", engine_args=arguments)
    with pytest.raises(UserError, match=f"goes into a LoRA slot of SGLang, .*{says}"):
        with_adapter_slot(rollout, read_architecture(read_json(model_folder(model, 0) / CONFIG)), LORA)
