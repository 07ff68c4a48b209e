"""The reference that `megarl plan` counts is the one that `megarl rehearse` builds."""

import pytest

from megarl.cli import plan_recipe
from megarl.cli.main import build_parser
from megarl.config.compose import compose
from megarl.config.folder import known_model, recipes_folder
from megarl.rehearsal.job import rank_models

PRESETS = sorted(file.stem for file in (recipes_folder() / "algorithm").glob("*.yaml"))
MODEL = "qwen3_1_7b"


def planned_reference(words: list[str]) -> bool:
    options, overrides = build_parser().parse_known_args(["plan", "--model", MODEL, "--config-name", *words])
    options.overrides = overrides
    plan_recipe.complete(options)
    return options.keeps_reference


@pytest.mark.parametrize("kl", ["0", "0.1"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_reference_that_a_rehearsal_builds(preset: str, kl: str) -> None:
    teacher = ["+teachers={sums: {path: qwen3_8b}}"] if preset == "distillation" else []
    words = ["quickstart", f"+algorithm={preset}", f"algorithm.kl_coefficient={kl}", *teacher]
    config = compose(words[0], ["model.path=m", "output_dir=o", *words[1:]])
    policy = rank_models(config, known_model(MODEL))[0]
    assert planned_reference(words) == policy.reference
