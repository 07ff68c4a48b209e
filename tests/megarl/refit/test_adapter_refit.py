"""A run whose engines get the adapter alone is the run whose engines get it merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.output.places import ADAPTER
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig
from megarl.tracking import MetricValue
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

STEPS = 3
WITHOUT_A_COMPARISON = ("seconds/", "throughput/", "memory/", "refit/", "engines/")


CUTS = {
    "qwen3": ["megatron.expert_model_parallel_size=1", "megatron.tensor_model_parallel_size=2"],
    # And two data-parallel ranks of attention in each stage.
    "qwen3_moe": [
        "cluster.trainer_ranks=4",
        "megatron.expert_model_parallel_size=2",
        "megatron.pipeline_model_parallel_size=2",
        "megatron.num_layers_in_first_pipeline_stage=1",
    ],
    "deepseek_v3": [
        "megatron.expert_model_parallel_size=1",
        "megatron.pipeline_model_parallel_size=2",
        "lora.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj,gate_proj,up_proj,down_proj]",
    ],
}
"""How the trainer of a model is cut."""


@pytest.fixture
def config_of(tmp_path: Path, model_type: str) -> Any:
    model = write_tiny_model(model_type, tmp_path / "model")
    files = write_arithmetic(tmp_path / "data", held_out=16)

    def make(run: str, *overrides: str) -> MegarlConfig:
        return compose(
            "quickstart",
            [
                f"output_dir={tmp_path / run}",
                f"model.path={model}",
                f"data.train_files=[{files.train}]",
                f"data.eval_files=[{files.eval}]",
                "lora.rank=4",
                *CUTS[model_type],
                "megatron.lr=1e-2",
                "loop.prompts_per_step=8",
                "loop.samples_per_prompt=4",
                f"reward.function={Path(__file__).parents[1] / 'digits.py'}:count_digits",
                "refit.bucket_bytes=600000",
                "tracking.loggers=[]",
                *overrides,
            ],
        )

    return make


def run(config: MegarlConfig, *, dies_after: int | None = None) -> list[dict[str, Any]]:
    """The metrics of each step; after one of them the engine may die."""
    with open_job(RunSetup.read(config, "train")) as job:
        clock, metrics = Clock(), [job.refit(0)]
        for step in range(1, STEPS + 1):
            metrics.append(train_step(job, clock))
            if step == dies_after:
                ray.kill(job.engines.processes.workers[0].actor)
        job.export()
    return metrics


def compared(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """The numbers among the metrics that do not follow from the way of the weights."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not name.startswith(WITHOUT_A_COMPARISON)
    }


@pytest.mark.long
@pytest.mark.parametrize("model_type", list(CUTS))
def test_an_adapter_alone_makes_the_run_that_merged_weights_make(config_of: Any, tmp_path: Path) -> None:
    merged, alone = run(config_of("merged")), run(config_of("alone", "lora.merge=false"), dies_after=2)
    assert alone[-1]["engines/restarts"] == 1
    for step, (found, expected) in enumerate(zip(alone, merged, strict=True)):
        assert found["refit/direct"] == 0
        # Rank 4 of matrices of 96 and more rows and columns, and no embeddings.
        assert found["refit/bytes"] < 0.1 * expected["refit/bytes"]
        assert compared(found) == pytest.approx(compared(expected), rel=1e-5, abs=1e-5)
        if step:
            assert found["policy/gradient_norm"] > 1e-3
            assert found["log_prob_difference/max"] < 1e-5
    ours, theirs = (load_file(tmp_path / name / ADAPTER / "adapter_model.safetensors") for name in ("alone", "merged"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert max(float(tensor.abs().max()) for name, tensor in ours.items() if "lora_B" in name) > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3"])
def test_a_model_whose_adapter_has_no_slot_is_refused_before_anything_starts(config_of: Any, tmp_path: Path) -> None:
    other = write_tiny_model("deepseek_v3", tmp_path / "latent")
    with pytest.raises(UserError, match=r"would leave out that of kv_b_proj: .*, or set lora\.merge=true"):
        RunSetup.read(config_of("run", "lora.merge=false", f"model.path={other}"), "train")
