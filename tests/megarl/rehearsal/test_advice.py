"""Settings that are named where a rank does not fit."""

import pytest

from megarl.rehearsal.advice import advise
from megarl.rehearsal.need import Need

PARTS = {"weights": 2, "gradients": 2, "optimizer": 2, "activations": 2, "reward": 2}


@pytest.mark.parametrize("largest", PARTS)
@pytest.mark.parametrize("phase", ["predictions", "update", "refit"])
def test_fsdp2_is_not_advised_what_it_refuses(largest: str, phase: str) -> None:
    need = Need("trainer", phase, "stage 0", {**PARTS, largest: 9}, 1)
    advice = advise(need, ["trainer", "engine", "reward"], {"use_torch_fsdp2": True})
    for refused in ("pipeline_model", "expert_model", "optimizer_cpu_offload"):
        assert refused not in advice
    assert "megatron.tensor_model_parallel_size" in advice


@pytest.mark.parametrize(
    ("role", "phase", "largest", "named"),
    [
        ("trainer", "update", "optimizer", "megatron.optimizer_cpu_offload=true"),
        ("trainer", "update", "gradients", "megatron.expert_model_parallel_size"),
        ("trainer", "update", "activations", "loop.max_tokens_per_micro_batch"),
        ("trainer", "update", "reward", "cluster.pools"),
        ("engine", "rollout", "weights", "refit.bucket_bytes"),
        ("engine", "longest response", "weights", "rollout.weights=fp8_block"),
    ],
)
def test_advice_is_about_what_takes_most(role: str, phase: str, largest: str, named: str) -> None:
    need = Need(role, phase, "rank 0", {**PARTS, largest: 9}, 1)
    assert named in advise(need, ["trainer", "engine", "reward"], {})
