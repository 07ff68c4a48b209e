"""A file of settings that a verl command names counts below the command's own, or is said not to be there."""

from pathlib import Path

import pytest
from verl_scripts import PPO_KEYS, said

from converters.errors import UserError
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import TranslatedRecipe, check
from megarl.config.foreign.verl_notes import WHOLE

OWN_FILE = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - part
  - _self_
data:
  shuffle: False
  max_prompt_length: 1024
  seed: 3
actor_rollout_ref:
  model:
    path: ${oc.env:MODEL}
  actor:
    clip_ratio_low: 3e-4
    optim: {lr: 1e-6, lr_scheduler_type: cosine, min_lr_ratio: 1e-1}
  rollout:
    val_kwargs:
      n: ${oc.env:SAMPLES}
    multi_turn:
      enable: True
      max_assistant_turns: 2
"""


def of_command(folder: Path, options: str, before: str = "") -> TranslatedRecipe:
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "mine.yaml").write_text(OWN_FILE)
    (folder / "config" / "part.yaml").write_text("data: {seed: 2, max_response_length: 64}\n")
    words = " ".join([*PPO_KEYS, "actor_rollout_ref.rollout.val_kwargs.n=2", "+data.max_prompt_length=32"])
    (folder / "run.sh").write_text(f"{before}\npython3 -m verl.trainer.main_ppo {options} {words}\n")
    return from_verl([str(folder / "run.sh")], {"PWD": str(folder)})


@pytest.mark.parametrize(
    "options",
    [
        "--config-path=\"$(pwd)/config\" --config-name='mine'",
        "--config-path $PWD/config --config-name mine.yaml",
        "-cp $PWD/config -cn mine",
        "--config-dir=$PWD/config --config-name=mine",
    ],
)
def test_a_file_that_is_there_is_read(tmp_path: Path, options: str) -> None:
    recipe = of_command(tmp_path, options)
    assert recipe.get("data.shuffle") is False
    assert recipe.get("loop.seed") == 3
    assert recipe.get("data.max_prompt_tokens") == 32
    assert recipe.get("megatron.min_lr") == pytest.approx(1e-7)
    assert recipe.get("algorithm.policy_loss_options")["clip_low"] == 3e-4
    assert recipe.get("rollout.max_response_tokens") == 64
    assert recipe.get("model.path") == "???"
    turns = [f"actor_rollout_ref.rollout.multi_turn.{each}" for each in ("enable=True", "max_assistant_turns=2")]
    assert said(recipe.absent) == turns
    (tmp_path / "config" / "part.yaml").unlink()
    text = (tmp_path / "run.sh").read_text().replace("actor_rollout_ref.rollout.val_kwargs.n=2", "")
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: \$\{oc\.env:SAMPLES\} has no value"):
        from_verl([str(tmp_path / "run.sh")], {"PWD": str(tmp_path)})


@pytest.mark.parametrize(
    ("defaults", "seed"),
    [
        ("defaults: [_self_, part]", 2),
        ("defaults: [part, _self_]", 3),
        ("defaults: [part]", 3),
        ("defaults:", 3),
        ("defaults: part", r"mine\.yaml are no list of names"),
        ("defaults: [mine]", r"mine\.yaml names itself"),
    ],
)
def test_files_count_in_the_order_of_their_names(tmp_path: Path, defaults: str, seed: int | str) -> None:
    of_command(tmp_path, "--config-path=$PWD/config --config-name=mine")
    (tmp_path / "config" / "mine.yaml").write_text(f"{defaults}\ndata: {{seed: 3}}\n")
    given = ([str(tmp_path / "run.sh")], {"PWD": str(tmp_path)})
    if isinstance(seed, int):
        assert from_verl(*given).get("loop.seed") == seed
        return
    with pytest.raises(UserError, match=seed):
        from_verl(*given)


def test_values_of_several_lines_are_said_in_one(tmp_path: Path) -> None:
    of_command(tmp_path, "--config-path=$PWD/config --config-name=mine")
    text = (tmp_path / "config" / "mine.yaml").read_text()
    (tmp_path / "config" / "mine.yaml").write_text(f'{text}  custom_chat_template: "{{\\n%- if a %}}"\n')
    recipe = from_verl([str(tmp_path / "run.sh")], {"PWD": str(tmp_path)})
    check(recipe)
    assert "actor_rollout_ref.custom_chat_template={ %- if a %}" in recipe.yaml("A recipe").splitlines()[2]


@pytest.mark.parametrize("folder", ["/nowhere", "config", "$WHERE"])
def test_a_file_that_is_not_there_is_said(tmp_path: Path, folder: str) -> None:
    recipe = of_command(tmp_path, f"--config-path={folder} --config-name=mine")
    why = f"there is no such file in {folder}, and its settings are left out"
    assert recipe.absent == {why: ["mine.yaml"]}


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer.yaml", "dapo_trainer"])
def test_the_files_of_verl_itself_are_its_defaults(tmp_path: Path, name: str) -> None:
    recipe = of_command(tmp_path, f"--config-path=config --config-name={name}")
    assert recipe.absent == {}


@pytest.mark.parametrize(("name", "is_whole"), [("ppo_trainer", True), ("ppo_megatron_trainer", False)])
def test_the_trainer_is_that_of_the_file(tmp_path: Path, name: str, is_whole: bool) -> None:
    words = "data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo --config-name={name} {words}\n")
    recipe = from_verl([str(tmp_path / "run.sh")], {})
    assert (WHOLE in recipe.absent) is is_whole
    assert (recipe.get("megatron.recompute_granularity") == "full") is is_whole


def test_a_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.sh:2: \$NAME has no value"):
        of_command(tmp_path, "--config-name=$NAME", "if [ $1 ]; then NAME=mine; fi")
