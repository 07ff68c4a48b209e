"""When a run evaluates."""

import json
from pathlib import Path

import pytest

from megarl.config.compose import compose
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import LoopConfig
from megarl.stages.evaluate import evaluates_after
from megarl.tracking.jsonl import FILE_NAME
from megarl.train import train


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_it_evaluates_after_every_so_many_steps_and_the_last_or_never(every: int, steps: list[int]) -> None:
    loop = LoopConfig(steps=5, eval_every=every)
    assert [step for step in range(1, 6) if evaluates_after(step, loop)] == steps


@pytest.mark.long
@pytest.mark.usefixtures("shared_cluster")
def test_the_evaluation_before_the_first_step_can_be_left_out(tmp_path: Path) -> None:
    files = write_arithmetic(tmp_path / "data", held_out=8)
    config = compose(
        "quickstart",
        [
            f"output_dir={tmp_path / 'run'}",
            f"model.path={write_tiny_model('qwen3', tmp_path / 'model')}",
            *(f"data.train_files=[{files.train}]", f"data.eval_files=[{files.eval}]"),
            *("rollout.engine=transformers", "cluster.trainer_ranks=1", "megatron.expert_model_parallel_size=1"),
            *("loop.steps=1", "loop.prompts_per_step=4", "loop.samples_per_prompt=2", "tracking.loggers=[jsonl]"),
            *(f"reward.function={Path(__file__).with_name('digits.py')}:count_digits", "loop.eval_at_start=false"),
        ],
    )
    train(config)
    (line,) = map(json.loads, Path(config.output_dir, FILE_NAME).read_text().splitlines())
    assert line["step"] == 1
    assert "eval/accuracy" in line
    # The start takes ten times as long as the step: an engine that was idle there is busy in the rollout.
    assert line["throughput/engines_idle"] < 1 - 0.5 * line["seconds/rollout"] / line["seconds/step"]
