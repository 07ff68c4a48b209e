"""Refusals of training on preferences, each with its reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.schema import MegarlConfig

RECIPES = ("quickstart_dpo", "quickstart_reward_model", "quickstart_spin")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., MegarlConfig]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.parquet").touch()
    given = [
        f"model.path={tmp_path}/model",
        f"output_dir={tmp_path}/out",
        f"preference.train_files=[{tmp_path}/data.parquet]",
    ]
    return lambda recipe, *overrides: compose(recipe, [*given, *overrides])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_are_valid(make_config: Callable[..., MegarlConfig], recipe: str) -> None:
    validate(make_config(recipe), recipe.removeprefix("quickstart_").replace("_", "-"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("preference.steps=0", "preference.steps=0 is too small: it must be at least 1"),
        ("preference.pairs_per_step=0", "preference.pairs_per_step=0"),
        ("preference.eval_every=0", "preference.eval_every=0"),
        ("preference.steps_per_generation=0", "preference.steps_per_generation=0"),
        ("preference.beta=0", "preference.beta=0.0 must be above 0"),
        ("preference.label_smoothing=0.5", "preference.label_smoothing=0.5 must be"),
        ("preference.train_files=[]", "preference.train_files is empty"),
        ("preference.train_files=[gone.parquet]", "preference.train_files: there is no file gone.parquet"),
        ("preference.eval_files=[gone.parquet]", "preference.eval_files: there is no file gone.parquet"),
        ("megatron.lr=null", "megatron.lr is not set"),
        ("model.path=nowhere", "model.path=nowhere is not a HuggingFace folder"),
    ],
)
def test_training_is_refused(make_config: Callable[..., MegarlConfig], override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate(make_config("quickstart_dpo", override), "dpo")


@pytest.mark.parametrize(
    ("command", "override", "others"),
    [
        ("reward-model", "preference.beta=0.5", "megarl dpo or spin"),
        ("reward-model", "preference.label_smoothing=0.1", "megarl dpo or spin"),
        ("reward-model", "preference.steps_per_generation=3", "megarl spin"),
        ("dpo", "preference.messages_column=chat", "megarl spin"),
        ("spin", "preference.chosen_column=best", "megarl dpo or reward-model"),
    ],
)
def test_a_key_that_only_other_commands_read_is_refused(
    make_config: Callable[..., MegarlConfig], command: str, override: str, others: str
) -> None:
    with pytest.raises(UserError, match=f"^{override} is for {others}, and has no effect in megarl {command}: leave"):
        validate(make_config(f"quickstart_{command.replace('-', '_')}", override), command)


@pytest.mark.parametrize("command", ["dpo", "spin"])
def test_a_policy_learns_preferences_alone(make_config: Callable[..., MegarlConfig], command: str) -> None:
    with pytest.raises(UserError, match=r"^model\.mtp_training=joint .* alone: set it to detached, or none$"):
        validate(make_config(f"quickstart_{command}", "model.mtp_training=joint"), command)
    for training in ("detached", "none"):
        validate(make_config(f"quickstart_{command}", f"model.mtp_training={training}"), command)
