"""For how many optimizer steps the models of a run are made, which is where a decay of the learning rate ends."""

from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from megarl.config.compose import compose
from megarl.config.megatron import megatron_options
from megarl.run import job
from megarl.run.opening import RunSetup


class Steps(NamedTuple):
    """Optimizer steps that each model is made for."""

    policy: int
    critic: int | None


def made_for(monkeypatch: pytest.MonkeyPatch, recipe: str, *overrides: str) -> Steps:
    """The steps that the ranks of policy and critic are asked for, none of which starts."""
    config = compose(recipe, ["model.path=x", "data.train_files=[x]", "data.eval_files=[x]", *overrides])
    groups: dict[str, MagicMock] = {}

    def place(options: Any, name: str = "policy") -> MagicMock:
        return groups.setdefault(name, MagicMock())

    processes = MagicMock()
    processes.trainer.side_effect = place
    monkeypatch.setattr(job, "EngineStart", MagicMock())
    setup = RunSetup(config, "train", MagicMock(), megatron_options(config))
    job._start_models(setup, processes, [], reference=False)
    found = {name: group.build.call_args.args[2] for name, group in groups.items()}
    return Steps(found["policy"], found.get("critic"))


@pytest.mark.parametrize(
    ("recipe", "overrides", "steps"),
    [
        ("quickstart_ppo", ("loop.steps=40", "critic.warmup_steps=5"), Steps(35 * 2, 40 * 2)),
        ("quickstart_ppo", ("loop.steps=40", "critic.warmup_steps=0"), Steps(40 * 2, 40 * 2)),
        # A policy that never learns has a schedule nevertheless.
        ("quickstart_ppo", ("loop.steps=5", "critic.warmup_steps=5"), Steps(2, 5 * 2)),
        ("quickstart_dapo", ("loop.steps=40",), Steps(40 * 2, None)),
    ],
)
def test_a_model_is_made_for_the_steps_that_it_will_take(
    monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: tuple[str, ...], steps: Steps
) -> None:
    assert made_for(monkeypatch, recipe, *overrides) == steps
