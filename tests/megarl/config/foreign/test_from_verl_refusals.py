"""Settings of a verl command that a recipe cannot have: refused, left out with a word, or nothing lost."""

from pathlib import Path

import pytest
from verl_scripts import ACTOR, MEGATRON, PPO_KEYS, said, translated

from converters.errors import UserError
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import check


def test_what_ranks_need_beside_make_setup_is_said(tmp_path: Path) -> None:
    words = "python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer'"
    option = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type"
    recipes = {
        each: translated(tmp_path, f"{words} +{option}={each}").yaml("A recipe") for each in ("flex", "alltoall")
    }
    assert (
        "\n# Only where ranks can import deep_ep: megatron.moe_token_dispatcher_type=flex: flex sends"
        in recipes["flex"]
    )
    assert "deep_ep" not in recipes["alltoall"]


@pytest.mark.parametrize("place", ["optim", "megatron"])
def test_refused_options_of_the_optimizer_are_left_out_and_said(place: str) -> None:
    given = f"+{ACTOR}{place}.override_optimizer_config."
    lost = [f"{given[1:]}exp_avg_dtype=fp8", f"{given[1:]}pin_cpu_params=False"]
    recipe = from_verl([*PPO_KEYS, *(f"+{each}" for each in lost), f"{given}use_precision_aware_optimizer=True"], {})
    assert said(recipe.absent) == lost
    assert recipe.get("megatron.use_precision_aware_optimizer") is True
    on_host = [f"{given}{option}" for option in ("optimizer_cpu_offload=True", "exp_avg_dtype=bf16")]
    with pytest.raises(UserError, match=r"exp_avg_dtype=bf16 is not supported with megatron\.optimizer_cpu"):
        check(from_verl([*PPO_KEYS, *on_host], {}))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.adv_estimator=grp"], r"algorithm\.adv_estimator=grp has no counterpart.*did you mean grpo\?"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=100"], "1024 cannot be cut into mini-batches of"),
        (["data.train_batch_size=0"], r"data\.train_batch_size=0 is no number of at least 1"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], r"ppo_mini_batch_size=0 is no number of at least 1"),
        (["actor_rollout_ref.rollout.n=-1"], r"rollout\.n=-1 is no number of at least 1"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=0"], "size=0 is no number of at least 1"),
        (["actor_rollout_ref.rollout.engine_kwargs.vllm.tensor_parallel_size=0"], "size=0 is no number of at least 1"),
        (["trainer.nnodes=0"], r"trainer\.nnodes=0 is no number of at least 1"),
        (["trainer.n_gpus_per_node=eight"], r"trainer\.n_gpus_per_node=eight is no number of at least 1"),
        (
            ["distillation.enabled=True"],
            r"distillation\.enabled=True is on-policy distillation, .* teachers\.NAME\.path",
        ),
        (
            [f"algorithm.rollout_correction.{each}" for each in ("rollout_is=token", "rollout_is_threshold=a_b")],
            "rollout_is_threshold=a_b is neither a bound nor two",
        ),
        (["actor_rollout_ref.rollout.name=hf"], "is none of the engines"),
        (["trainer.n_gpus_per_node=3"], "3 GPUs cannot be shared out among engines of 2"),
        (["~trainer.logger"], "~trainer.logger"),
    ],
)
def test_what_cannot_be_translated_is_one_sentence(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_verl([*overrides, "data.seed=1"], {})


def test_a_value_that_a_script_computes_matters_only_where_it_is_used(tmp_path: Path) -> None:
    script = f"python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$1 trainer.unknown=$(date) {MEGATRON} "
    recipe = translated(tmp_path, script)
    assert recipe.get("model.path") == "???"
    assert said(recipe.absent) == ["trainer.unknown=$(date)"]
    check(recipe)
    with pytest.raises(UserError, match=r"run\.sh:1: \$RANKS has no value"):
        translated(tmp_path, f"{script} trainer.nnodes=$RANKS")


@pytest.mark.parametrize("end", ["\n", " \\\n# a comment\n", " \\ # a comment\n"])
@pytest.mark.parametrize("setting", ["trainer.nnodes=2", "+reward_model.reward_kwargs.max_resp_len=8"])
def test_settings_that_reach_no_program_are_refused(tmp_path: Path, end: str, setting: str) -> None:
    script = f"python -m verl.trainer.main_ppo data.seed=1END  {setting} \\\n  data.train_batch_size=512\n"
    lines = end.count("\n") + 1
    with pytest.raises(UserError, match=rf"run\.sh:{lines}: these arguments are given to no program"):
        translated(tmp_path, script.replace("END", end))
    assert translated(tmp_path, script.replace("END", " \\\n")).get("loop.prompts_per_step") == 512


def test_a_recipe_that_could_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compares the responses to one prompt"):
        check(from_verl(["algorithm.adv_estimator=grpo"], {}))


def test_settings_that_ask_for_nothing_are_no_loss() -> None:
    """A file of all of verl's settings has hundreds at values in which they do nothing."""
    nothing = ["actor_rollout_ref.actor.ppo_epochs=1", "global_profiler.steps=[1]", "lora.type=lora", "a._target_=B"]
    given = ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=2", "critic.ppo_epochs=2", MEGATRON]
    recipe = from_verl([*given, *nothing], {})
    assert recipe.absent == {}
    assert "actor_rollout_ref.actor.ppo_epochs=1" in said(recipe.always)
    asked = from_verl([*given, "actor_rollout_ref.actor.ppo_epochs=2", "global_profiler.tool=nsys"], {})
    assert said(asked.absent) == ["actor_rollout_ref.actor.ppo_epochs=2", "global_profiler.tool=nsys"]


@pytest.mark.parametrize(
    ("setting", "is_alike"),
    [
        *((f"reward_model.reward_manager={name}", name != "collabllm") for name in ("naive", "dapo", "collabllm")),
        ("reward_manager.name=remote", False),
        (f"{ACTOR}checkpoint.save_contents=[model,optimizer,extra]", True),
        (f"{ACTOR}checkpoint.save_contents=[hf_model]", False),
        ("critic.ppo_mini_batch_size=8", True),
        ("critic.ppo_mini_batch_size=4", False),
    ],
)
def test_a_setting_is_so_in_any_case_only_where_its_value_is(setting: str, is_alike: bool) -> None:
    recipe = from_verl([*PPO_KEYS, setting], {})
    value = setting.rpartition("=")[2].replace("[", "['").replace("]", "']")
    assert [found.rpartition("=")[2] for found in said(recipe.absent)] == ([] if is_alike else [value])
