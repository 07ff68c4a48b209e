"""The algorithms with more than a policy and a reward, under schedules that sample ahead."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import without_timings
from test_algorithm_runs import REWARD, name_sources, write_scorer
from test_colocation import OF_SPEED, exported

from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.tracking import read_history
from megarl.train import train

pytestmark = [pytest.mark.usefixtures("shared_cluster"), pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4
SCHEDULES = {"wait": 1, "recompute": 2, "keep": 2}
"""How responses in flight go on -> `schedule.max_staleness`."""
ALGORITHMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("quickstart_ppo", ("critic.ranks=1", "critic.warmup_steps=1")),
    "prime": ("quickstart_prime", ()),
    "sppo": ("quickstart_sppo", ("algorithm.refresh_reference_every=2",)),
    "distillation": (
        "quickstart_distillation",
        (
            "teachers.sums.path={other}",
            "teachers.sums.data_sources=[even]",
            "+teachers.more={{path: {model}, ranks: 1, data_sources: [odd]}}",
        ),
    ),
    # Most groups teach nothing: others take their places.
    "reward model": (
        "quickstart",
        (
            "reward_model.path={scorer}",
            "reward_model.ranks=1",
            "reward_model.weight=0.1",
            "algorithm.dynamic_sampling=true",
            "algorithm.max_refills=20",
        ),
    ),
}


@pytest.mark.parametrize("in_flight", SCHEDULES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_finishes_with_finite_numbers_within_its_bound_and_repeats_itself_with_wait(
    algorithm: str, in_flight: str, tmp_path: Path
) -> None:
    overrides = prepared(tmp_path, algorithm)
    lines, weights = run(algorithm, in_flight, overrides, tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
        assert line["staleness/max"] <= SCHEDULES[in_flight]
    assert max(line["staleness/max"] for line in lines) > 0
    assert all(tensor.isfinite().all() for tensor in weights.values())
    if in_flight == "wait":
        assert [line["staleness/max"] for line in lines] == [0, *[1] * (STEPS - 1)]
        again, same = run(algorithm, in_flight, overrides, tmp_path / "again")
        found, expected = ([without_timings(line, *OF_SPEED) for line in each] for each in (again, lines))
        assert found == expected
        for name, tensor in weights.items():
            assert torch.equal(tensor, same[name]), name


def prepared(folder: Path, algorithm: str) -> list[str]:
    """Overrides of a run, with what they name in a folder."""
    model = write_tiny_model("qwen3", folder / "model", seed=1)
    other = write_tiny_model("qwen3", folder / "other", seed=2)
    files = write_arithmetic(folder / "data")
    name_sources(files.train)
    folders = {"model": model, "other": other, "scorer": write_scorer(other, folder / "scorer")}
    _, own = ALGORITHMS[algorithm]
    return [
        f"model.path={model}",
        f"data.train_files=[{files.train}]",
        REWARD,
        "megatron.expert_model_parallel_size=1",
        "cluster.trainer_ranks=1",
        f"loop.steps={STEPS}",
        "loop.prompts_per_step=4",
        "loop.samples_per_prompt=4",
        "rollout.max_response_tokens=12",
        "reward.overlong_buffer_tokens=0",
        "checkpoint.every=0",
        "tracking.loggers=[jsonl]",
        "rollout.engine=transformers",
        *(override.format(**folders) for override in own),
    ]


def run(
    algorithm: str, in_flight: str, overrides: list[str], output: Path
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Metrics of the steps, and the weights of the end."""
    recipe, _ = ALGORITHMS[algorithm]
    scheduled = [f"schedule.max_staleness={SCHEDULES[in_flight]}", f"schedule.in_flight={in_flight}"]
    config = compose(recipe, [*overrides, *scheduled, f"output_dir={output}"])
    validate(config, "train")
    train(config)
    return read_history(output), exported(config)
