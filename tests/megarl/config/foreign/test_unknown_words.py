"""Words of a script that may be arguments and cannot be read are never left out: a variable that a branch sets."""

from pathlib import Path

import pytest
from slime_scripts import script
from verl_scripts import PPO_KEYS

from converters.errors import UserError
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.megatron_script import read_megatron_script

GROWS = 'ARGS="{0}"\nif [[ $1 == more ]]; then ARGS="$ARGS {0}"; fi\n'


def write(folder: Path, text: str) -> Path:
    (folder / "run.sh").write_text(text)
    return folder / "run.sh"


@pytest.mark.parametrize("word", ["$ARGS", '"$ARGS"', "$NEVER", "algorithm.$ARGS=1", "model_engine=$ARGS"])
def test_settings_of_verl(tmp_path: Path, word: str) -> None:
    file = write(tmp_path, f"{GROWS.format('x.y=2')}python3 -m verl.trainer.main_ppo {' '.join(PPO_KEYS)} {word}\n")
    with pytest.raises(UserError, match=r"run\.sh:3: \$(ARGS|NEVER) has no value that can be read"):
        from_verl([str(file)], {})


@pytest.mark.parametrize(
    "arguments",
    [
        *("--offload", "--offload-train", "--use-rollout-logprobs", "--save /x", "--ref-load=/x", "--swiglu"),
        *("--disable-rewards-normalization", "--disable-rollout-global-dataset", "--disable-wandb-random-suffix"),
        *("--disable-compute-advantages-and-returns", "--wandb-always-use-train-step", "--log-multi-turn"),
        *("--log-passrate", "--log-correct-samples"),
        *("--no-load-optim", "--sglang-mem-fraction-static 0.5", "--sglang-page-size"),
    ],
)
def test_arguments_of_slime(tmp_path: Path, arguments: str) -> None:
    file = script(tmp_path, "   --actor-num-nodes 2", f"   {arguments} $ARGS --actor-num-nodes 2")
    file.write_text(GROWS.format("--lr 3") + file.read_text())
    with pytest.raises(UserError, match=r"\$ARGS has no value that can be read"):
        from_slime(file, {"BASE": "/b"})


@pytest.mark.parametrize(
    "arguments", ["--rl-sequence-packing-algo fifo", "--finetune", "--bf16", "--no-rope-fusion", "--save /x $(date)"]
)
def test_arguments_of_megatron(tmp_path: Path, arguments: str) -> None:
    file = write(tmp_path, GROWS.format("--lr 3") + f"python pretrain_gpt.py --lr 1e-6 {arguments} $ARGS\n")
    with pytest.raises(UserError, match=r"\$(ARGS|\(date\)) has no value that can be read"):
        read_megatron_script(file, {})


def test_a_value_that_changes_nothing_may_be_unknown(tmp_path: Path) -> None:
    file = write(tmp_path, 'python pretrain_gpt.py --lr 1e-6 --save $1 --load "$2" --finetune\n')
    assert [each.text for each in read_megatron_script(file, {}).assignments] == ["megatron.lr=1e-6"]


def test_settings_of_verl_in_an_array_that_a_branch_fills_are_said_with_their_place(tmp_path: Path) -> None:
    grows = "ARGS=(data.seed=3)\nif [[ $DEVICE == npu ]]; then\n  ARGS+=(\n    data.shuffle=False)\nfi\nOTHER=(x.y=1)\n"
    grows += "while read -r _; do OTHER+=(x.z=1); done < file\n"
    file = write(tmp_path, f'{grows}python3 -m verl.trainer.main_ppo {" ".join(PPO_KEYS)} "${{ARGS[@]}}"\n')
    recipe = from_verl([str(file)], {})
    assert recipe.get("loop.seed") == 3
    assert recipe.absent == {"it stands in a branch or a loop of the script": [f"{file}:3"]}
    assert f"# No counterpart: {file}:3: it stands in a branch" in recipe.yaml("A recipe")


SETS = 'case "$DEVICE" in\n  gpu) TP=8 ;;\n  *) TP=2 ;;\nesac\nTP+=0\n'


def test_a_variable_that_a_branch_sets_is_that_of_the_environment_and_is_said(tmp_path: Path) -> None:
    settings = f"{' '.join(PPO_KEYS)} data.seed=$TP"
    file = write(tmp_path, f"{SETS}python3 -m verl.trainer.main_ppo {settings}\n")
    with pytest.raises(UserError, match=r"run\.sh:6: \$TP has no value .* export the variable"):
        from_verl([str(file)], {})
    recipe = from_verl([str(file)], {"TP": "4"})
    assert recipe.get("loop.seed") == 40
    why = "a branch or a loop of the script sets it, and its value in the environment is taken"
    assert recipe.absent == {why: ["TP=4"]}
    file.write_text(f"{SETS}python3 pretrain_gpt.py --lr 1e-6 --tensor-model-parallel-size $TP\n")
    script_of_megatron = read_megatron_script(file, {"TP": "4"})
    assert script_of_megatron.assignments[1].text == "megatron.tensor_model_parallel_size=40"
    assert list(script_of_megatron.notes()) == [f"not sure, since {why}: TP=4"]
    assert "TP=4" in str(from_slime(given_slime(tmp_path), {"BASE": "/b", "TP": "4"}).absent)


def given_slime(folder: Path) -> Path:
    file = script(folder, "--tensor-model-parallel-size 4", "--tensor-model-parallel-size $TP")
    file.write_text(SETS + file.read_text())
    return file
