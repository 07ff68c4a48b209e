"""For how many optimizer steps the models of a run are made, which is where a decay of the learning rate ends."""

import pytest

from megarl.run.job import OptimizerSteps, optimizer_steps
from megarl.schema import AlgorithmConfig, CriticConfig, MegarlConfig


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "expected"),
    [
        (40, 5, OptimizerSteps(policy=35 * 2, auxiliary=40 * 2)),
        (40, 0, OptimizerSteps(policy=40 * 2, auxiliary=40 * 2)),
        # A policy that never learns has a schedule nevertheless.
        (5, 5, OptimizerSteps(policy=2, auxiliary=5 * 2)),
    ],
)
def test_a_model_is_made_for_the_steps_that_it_will_take(
    steps: int, warmup_steps: int, expected: OptimizerSteps
) -> None:
    config = MegarlConfig(algorithm=AlgorithmConfig(updates_per_step=2), critic=CriticConfig(warmup_steps=warmup_steps))
    assert optimizer_steps(config, steps) == expected
