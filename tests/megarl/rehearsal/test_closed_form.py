"""An engine that cannot be built without memory is counted in closed form, as `megarl plan` counts it."""

from math import prod
from typing import Any

import pytest
import torch

from converters.architectures import Lora, adapter_architecture, read_architecture
from megarl.config.compose import compose
from megarl.config.folder import known_model
from megarl.rehearsal.engine import RehearsedEngine, rehearse_engine
from megarl.rehearsal.own_process import OwnProcesses


def counted(*words: str) -> RehearsedEngine:
    given = ["model.path=m", "output_dir=o", "rollout.engine=sglang", "~rollout.engine_args", *words]
    config = compose("grpo_qwen3_1_7b", given)
    return rehearse_engine(config, known_model("qwen3_1_7b"), torch.bfloat16, 80 * 2**30, OwnProcesses())


def test_keys_and_values_in_fp8_take_half_as_much() -> None:
    whole, half = counted(), counted("+rollout.engine_args.kv_cache_dtype=fp8_e4m3")
    assert "no worker of" in whole.why_not_direct
    assert half.longest == whole.longest / 2
    assert half.weights == whole.weights


def test_an_engine_takes_the_share_that_it_would_choose_on_this_gpu() -> None:
    assert counted().share == 0.824
    assert counted("+rollout.engine_args.mem_fraction_static=0.5").share == 0.5
    assert counted().computes_beside


def slot(hf_config: dict[str, Any], *words: str) -> int:
    """Bytes that an engine has for an adapter of rank 8 beside what it has without one."""
    given = ["model.path=m", "output_dir=o", "~rollout.engine_args", *words]
    with_adapter = ["lora.rank=8", "lora.alpha=8", "lora.merge=false"]
    weights = [
        rehearse_engine(compose("grpo_qwen3_1_7b", each), hf_config, torch.bfloat16, 80 * 10**9, OwnProcesses()).weights
        for each in (given, [*given, *with_adapter])
    ]
    return weights[1] - weights[0]


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.long)])
def test_the_slot_of_an_adapter_that_goes_alone_is_among_the_weights(engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    hf_config = {**known_model("qwen3_1_7b"), "num_hidden_layers": 2}
    adapter = adapter_architecture(read_architecture(hf_config), Lora(8, 8))
    assert slot(hf_config, f"rollout.engine={engine}") == 2 * sum(map(prod, adapter.hf_shapes.values()))


def test_a_slot_has_room_for_what_is_fused_with_an_adapted_matrix() -> None:
    hf_config = {**known_model("qwen3_1_7b"), "num_hidden_layers": 2}
    fused = Lora(8, 8, ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    shapes = adapter_architecture(read_architecture(hf_config), fused).hf_shapes.values()
    given = "rollout.engine=sglang", "lora.target_modules=[k_proj,up_proj]"
    assert slot(hf_config, *given) == 2 * sum(map(prod, shapes))
