"""Scripts of verl and slime train here as the program does that they start, or are refused by its name."""

from pathlib import Path

import pytest
from slime_scripts import script
from verl_scripts import ACTOR, MEGATRON, said

from converters.errors import UserError
from megarl.config.foreign.from_slime import from_slime
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import TranslatedRecipe, check

ROLLOUT = "actor_rollout_ref.rollout."
SETTINGS = [
    *("algorithm.adv_estimator=grpo", f"{ROLLOUT}n=4", "data.train_batch_size=16", f"{ACTOR}ppo_mini_batch_size=8"),
    *(f"{ROLLOUT}tensor_model_parallel_size=1", MEGATRON, "trainer.total_training_steps=5"),
]


def of_program(folder: Path, program: str, *settings: str) -> TranslatedRecipe:
    (folder / "run.sh").write_text(f"NAME=$1\npython3 {program} {' '.join([*SETTINGS, *settings])}\n")
    return from_verl([str(folder / "run.sh")], {})


@pytest.mark.parametrize(
    "program",
    [
        *("-m verl.trainer.main_ppo", "main_ppo.py", "./main_ppo.py", "$HOME/verl/trainer/main_ppo.py"),
        *("-m recipe.dapo.main_dapo", "-m recipe.entropy.main_entropy", "-m recipe.transfer_queue.main_ppo"),
    ],
)
def test_programs_that_train_as_verl_does(tmp_path: Path, program: str) -> None:
    recipe = of_program(tmp_path, program)
    assert recipe.values == from_verl(SETTINGS, {}).values
    assert recipe.get("schedule") is None


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("-m recipe.sppo.main_sppo", "recipe.sppo.main_sppo is SPPO, the preset algorithm=sppo"),
        ("-m recipe.spin.main_spin", "megarl spin"),
        ("-m recipe.prime.main_prime", "algorithm=prime"),
        ("-m main_gkd", r"teachers\.NAME\.path"),
        ("-m recipe.vla.main_ppo", r"is another trainer than verl\.trainer\.main_ppo"),
        ("-m recipe.flowrl.main_flowrl", "is another trainer"),
        ("-m verl.experimental.fully_async_policy.fully_async_main", r"require_batches.* schedule\.max_staleness"),
        ("mine.py", r"run\.sh:2: mine\.py is another trainer"),
        ("-m $NAME", r"run\.sh:2: \$1 is another trainer"),
        *((f"-m verl.trainer.{name}", "is megarl sft here") for name in ("sft_trainer", "fsdp_sft_trainer")),
        *((f"-m verl.trainer.{name}", "trains nothing") for name in ("main_generation", "main_eval")),
    ],
)
def test_other_programs_of_verl_are_refused_by_name(tmp_path: Path, program: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        of_program(tmp_path, program)


TRAINS = f"python3 -m verl.trainer.main_ppo {' '.join(SETTINGS)} data.seed="


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        (f"if [ -d /d ]; then\n{TRAINS}1\nelse\n{TRAINS}2\nfi", r"run\.sh:2 and .*run\.sh:4 start programs"),
        (f"{TRAINS}1\n[ -d /d ] && {TRAINS}2", r"run\.sh:1 and .*run\.sh:2 start programs"),
        (f"if [ -d /d ]; then\n{TRAINS}1\nelse\n{TRAINS}1\nfi", 1),
        (f"python3 prep.py\nif [ -d /d ]; then\n{TRAINS}1\nfi", 1),
        (f"[ -d /d ] && {TRAINS}1\n{TRAINS}2", 2),
        (f"MODE=sync\nif [ $MODE = sync ]; then {TRAINS}1\nexit; fi\n{TRAINS}2", 1),
        (f"exec {TRAINS}1\n{TRAINS}2", 1),
        (
            f'A=(a.b=1)\nif [ -z "${{MODEL:-}}" ]; then\n  exit 1; fi\n{TRAINS}2',
            r"run\.sh:3 ends the script before .* export",
        ),
        (f"{TRAINS}1\nexit 1", 1),
        (f"exec > log\n[ -d /d ] || exit 1\n{TRAINS}2", 2),
        (f"source set.sh\n{TRAINS}$S", 5),
        (f"S=7\n[ -d /d ] && source set.sh\n{TRAINS}$S", r"\$S has no value"),
        (f"S=7\n[ -d /d ] && . set.sh\nS=8\n{TRAINS}$S", 8),
        (f"{TRAINS}1\npython3 -m verl.model_merger merge\ncp reward.py out/\n[ -f eval.py ]", 1),
        (f"{TRAINS}1\npython3 -m verl.trainer.main_eval x", 1),
        (f"{TRAINS}1\npython3 -m verl.trainer.sft_trainer x", "is megarl sft"),
        (f': "${{S:=3}}"\n{TRAINS}$S', 3),
        (f'S=4\n: "${{S:=3}}"\n{TRAINS}$S', 4),
        (f'[ -d /d ] && : "${{S:=3}}"\n{TRAINS}$S', r"\$S has no value"),
        (f"export A S=6\n{TRAINS}$S", 6),
    ],
)
def test_the_program_that_trains_and_its_values(tmp_path: Path, text: str, seed: int | str) -> None:
    (tmp_path / "set.sh").write_text("S=5\nreturn\nS=6\n")
    (tmp_path / "run.sh").write_text(text.replace("set.sh", str(tmp_path / "set.sh")))
    if isinstance(seed, int):
        assert from_verl([str(tmp_path / "run.sh")], {}).get("loop.seed") == seed
        return
    with pytest.raises(UserError, match=seed):
        from_verl([str(tmp_path / "run.sh")], {})


@pytest.mark.parametrize("package", ["recipe", "verl.experimental"])
def test_engines_that_sample_one_step_ahead(tmp_path: Path, package: str) -> None:
    """verl's own default there has the ratio to the policy that sampled in the loss."""
    sizes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=6", "rollout.nnodes=2", "rollout.n_gpus_per_node=2"]
    turns = ["actor_rollout_ref.hybrid_engine=False", f"{ACTOR}megatron.param_offload=False"]
    recipe = of_program(tmp_path, f"-m {package}.one_step_off_policy.main_ppo", *sizes, *turns)
    check(recipe)
    assert recipe.get("schedule") == {"max_staleness": 1, "corrected": False}
    assert recipe.get("algorithm.ratio_to") == "rollout"
    assert (recipe.get("cluster.trainer_ranks"), recipe.get("rollout.replicas")) == (12, 4)
    assert recipe.get("cluster.pools") == {
        "trainer": {"roles": ["trainer"], "nodes": 2, "gpus": 6},
        "engine": {"roles": ["engine"], "nodes": 2, "gpus": 2},
    }
    assert recipe.absent == {}
    assert recipe.always["trainer and engines have GPUs of their own, and keep their memory there"] == sorted(turns)
    with pytest.raises(UserError, match="keeps the critic on the trainer's GPUs"):
        of_program(tmp_path, f"-m {package}.one_step_off_policy.main_ppo", "algorithm.adv_estimator=gae")


def test_a_critic_apart_is_said(tmp_path: Path) -> None:
    recipe = of_program(tmp_path, "main_ppo_split.py", "algorithm.adv_estimator=gae")
    assert said(recipe.absent) == ["main_ppo_split.py"]


def test_slime_trains_and_samples_at_a_time_with_train_async(tmp_path: Path) -> None:
    given = script(tmp_path, "python3 train.py", "python3 train_async.py")
    with pytest.raises(UserError, match=r"train_async\.py does not run with --colocate"):
        from_slime(given, {"BASE": "/b"})
    given.write_text(given.read_text().replace("--colocate", "--rollout-num-gpus 16"))
    recipe = from_slime(given, {"BASE": "/b"})
    assert recipe.get("schedule") == {"max_staleness": 1, "corrected": False}
    assert recipe.get("cluster.pools") is None
    given.write_text(given.read_text().replace("train_async.py", "train.py"))
    assert from_slime(given, {"BASE": "/b"}).get("schedule") is None
    given.write_text(given.read_text().replace("train.py", "tools/convert.py"))
    with pytest.raises(UserError, match=r"tools/convert\.py is another trainer than train\.py"):
        from_slime(given, {"BASE": "/b"})
