"""An engine that cannot be built without memory is counted in closed form, as `megarl plan` counts it."""

import torch

from megarl.config.compose import compose
from megarl.config.folder import known_model
from megarl.rehearsal.engine import RehearsedEngine, rehearse_engine


def counted(*words: str) -> RehearsedEngine:
    given = ["model.path=m", "output_dir=o", "rollout.engine=sglang", "~rollout.engine_args", *words]
    config = compose("grpo_qwen3_1_7b", given)
    return rehearse_engine(config, known_model("qwen3_1_7b"), torch.bfloat16, gpu_bytes=80 * 2**30)


def test_keys_and_values_in_fp8_take_half_as_much() -> None:
    whole, half = counted(), counted("+rollout.engine_args.kv_cache_dtype=fp8_e4m3")
    assert "no worker of" in whole.why_not_direct
    assert half.longest == whole.longest / 2
    assert half.weights == whole.weights


def test_an_engine_takes_the_share_that_it_would_choose_on_this_gpu() -> None:
    assert counted().share == 0.824
    assert counted("+rollout.engine_args.mem_fraction_static=0.5").share == 0.5
    assert counted().computes_beside
