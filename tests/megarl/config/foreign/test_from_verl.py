"""Commands of verl become recipes that do the same; settings without a counterpart are said."""

import json
from pathlib import Path
from typing import Any

import pytest
import verl_scripts
import yaml
from verl_scripts import ACTOR, MEGATRON, PPO_KEYS, said, translated

from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import TranslatedRecipe, check
from megarl.config.origins import leaves

SHARED = {"nodes": 1, "shared": True}
ROLLOUT = "actor_rollout_ref.rollout."
FILTER = "algorithm.filter_groups."


def values(recipe: TranslatedRecipe, *groups: str) -> dict[str, Any]:
    return {key: value for key, value in leaves(recipe.values) if key.startswith(groups)}


def test_grpo_with_megatron(tmp_path: Path) -> None:
    recipe = translated(tmp_path, verl_scripts.GRPO)
    assert values(recipe, "algorithm.", "loop.", "megatron.", "cluster.", "data.", "model.", "output_dir") == {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "clip",
        "algorithm.policy_loss_options.clip_low": 0.2,
        "algorithm.policy_loss_options.clip_high": 0.2,
        "algorithm.policy_loss_options.dual_clip": 3.0,
        "algorithm.aggregation": "token_mean",
        "algorithm.kl_coefficient": 0.001,
        "algorithm.kl_estimator": "k3",
        "algorithm.updates_per_step": 2,
        "algorithm.entropy_coefficient": 0,
        "loop.prompts_per_step": 8,
        "loop.samples_per_prompt": 4,
        "loop.eval_samples": 1,
        "loop.max_tokens_per_micro_batch": 4 * (16 + 8),
        "loop.steps": 2,
        "loop.eval_every": 5,
        "megatron.tensor_model_parallel_size": 2,
        "megatron.lr": 1e-3,
        "megatron.weight_decay": 0.01,
        "megatron.clip_grad": 1.0,
        "cluster.trainer_ranks": 2,
        "cluster.pools.all.roles": ["trainer", "engine"],
        "cluster.pools.all.nodes": 1,
        "cluster.pools.all.shared": True,
        "data.train_files": ["/home/someone/data/train.parquet"],
        "data.eval_files": ["/home/someone/data/test.parquet"],
        "data.max_prompt_tokens": 16,
        "data.overlong_prompts": "drop",
        "model.path": "/home/someone/models/tiny",
        "model.dtype": "fp32",
        "output_dir": "checkpoints/verl_example/tiny_megatron",
    }
    assert recipe.get("rollout.replicas") == 2
    assert recipe.get("reward.function") == "reward.py:begins_with_a_digit"
    assert recipe.get("tracking.loggers") == ["jsonl", "console"]
    assert list(recipe.absent.values()) == [["swanlab"]]
    assert "actor_rollout_ref.model.use_fused_kernels=True" in said(recipe.always)


def test_dapo(tmp_path: Path) -> None:
    recipe = translated(tmp_path, verl_scripts.DAPO)
    assert values(recipe, "algorithm.", "reward.overlong", "megatron.", "loop.max_tokens", "loop.eval_at") == {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "clip",
        "algorithm.policy_loss_options.clip_low": 0.2,
        "algorithm.policy_loss_options.clip_high": 0.28,
        "algorithm.policy_loss_options.dual_clip": 10.0,
        "algorithm.aggregation": "token_mean",
        "algorithm.dynamic_sampling": True,
        "algorithm.filter_on": "outcome",
        # verl draws up to 10 batches of 16, here further prompts are counted, in times of 8.
        "algorithm.max_refills": 19,
        "algorithm.updates_per_step": 4,
        "reward.overlong_buffer_tokens": 4,
        "reward.overlong_penalty": 0.5,
        "megatron.lr": 1e-3,
        # verl counts rollouts, Megatron optimizer steps.
        "megatron.lr_warmup_steps": 40,
        "megatron.weight_decay": 0.1,
        "megatron.clip_grad": 1.0,
        "loop.max_tokens_per_micro_batch": 48,
        "loop.eval_at_start": False,
    }
    assert "data.truncation=left" in said(recipe.absent)
    # The penalty of its manager needs no reward model.
    assert recipe.always["each response is scored as it comes"] == ["reward_model.reward_manager=dapo"]
    counted = "the penalty counts from rollout.max_response_tokens"
    assert recipe.always[counted] == ["reward_model.reward_kwargs.max_resp_len=8"]


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ({"algorithm.adv_estimator": name, "algorithm.norm_adv_by_std_in_grpo": False}, "normalize_by_std", False)
        for name in ("grpo", "grpo_passk", "gdpo")
    ]
    + [
        ({f"{ACTOR}policy_loss.loss_mode": "dppo_tv", f"{ACTOR}clip_ratio_c": 10000.0}, "ratio_cap", 10000.0),
        ({f"{ACTOR}policy_loss.loss_mode": "dppo_kl"}, "ratio_cap", 3.0),
        ({f"{ACTOR}policy_loss.loss_mode": "sapo", f"{ACTOR}clip_ratio_c": 10.0}, "dual_clip", None),
        # In verl's own example of CISPO: no ratio is below 1 - 10, nor below 0.
        ({f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_low": 10}, "clip_low", 1.0),
        ({f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_low": 0.3}, "clip_low", 0.3),
        # Their own functions there take no notice of the aggregation.
        ({f"{ACTOR}policy_loss.loss_mode": "gspo"}, "aggregation", "seq_mean_token_mean"),
        ({f"{ACTOR}policy_loss.loss_mode": "geo_mean"}, "aggregation", "seq_mean_token_mean"),
        ({f"{ACTOR}policy_loss.loss_mode": "sapo"}, "aggregation", "seq_mean_token_mean"),
        ({f"{ACTOR}policy_loss.loss_mode": "cispo"}, "aggregation", "token_mean"),
        ({f"{FILTER}enable": True, f"{FILTER}max_num_gen_batches": 0}, "max_refills", 10**6),
        ({f"{FILTER}enable": True}, "max_refills", 10**6),
        ({f"{FILTER}max_num_gen_batches": 3}, "max_refills", None),
        ({f"{FILTER}enable": True, f"{FILTER}max_num_gen_batches": 3}, "max_refills", 2),
    ],
)
def test_a_setting_of_the_algorithm_means_the_same(overrides: dict[str, Any], key: str, value: Any) -> None:
    given = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}n": 8, **overrides}
    recipe = from_verl([f"{name}={each}" for name, each in given.items()], {})
    found = {name.split(".")[-1]: each for name, each in values(recipe, "algorithm.").items()}
    assert found.get(key) == value
    assert not [name for name in overrides if name in str(recipe.absent)]
    check(recipe)


@pytest.mark.parametrize(
    ("given", "samples", "temperature", "lost"),
    [
        (["n=1", "do_sample=True", "temperature=1.0", "top_p=0.7"], 1, 1.0, ["top_p=0.7"]),
        (["n=4", "temperature=0.6", "top_p=1.0", "top_k=-1"], 4, 0.6, []),
        (["n=1"], 1, None, []),
        (["n=4", "do_sample=False"], 1, None, []),
        (["n=1", "temperature=1e-5"], 1, None, []),
    ],
)
def test_held_out_responses_are_sampled_where_they_are_sampled_there(
    given: list[str], samples: int, temperature: float | None, lost: list[str]
) -> None:
    """verl samples at val_kwargs.temperature, by default 0, however many responses there are to a prompt."""
    below = f"{ROLLOUT}val_kwargs."
    recipe = from_verl([*PPO_KEYS, *(below + each for each in given)], {})
    assert (recipe.get("loop.eval_samples"), recipe.get("loop.eval_temperature")) == (samples, temperature)
    assert said(recipe.absent) == [below + each for each in lost]
    assert (f"{below}n=4" in said(recipe.always)) == (given == ["n=4", "do_sample=False"])


MTP = "actor_rollout_ref.model.mtp."


@pytest.mark.parametrize(
    ("given", "training", "factor"),
    [
        (["enable=True", "enable_train=True", "mtp_loss_scaling_factor=0.2", "detach_encoder=True"], "detached", 0.2),
        (["enable=True", "enable_train=True"], "joint", None),
        (["enable=True", "mtp_loss_scaling_factor=0.2"], "none", None),
        (["enable=False", "enable_train=True"], None, None),
    ],
)
def test_prediction_layers_learn_as_they_do_there(given: list[str], training: str | None, factor: float | None) -> None:
    recipe = from_verl([*PPO_KEYS, *(MTP + each for each in given)], {})
    check(recipe)
    assert recipe.get("model.mtp_training") == training
    assert recipe.get("megatron.mtp_loss_scaling_factor") == factor
    assert recipe.absent == {}


def test_drafts_of_an_engine_are_its_own_arguments() -> None:
    recipe = from_verl([*PPO_KEYS, f"{MTP}enable=True", f"{MTP}enable_rollout=True"], {})
    ((why, lost),) = recipe.absent.items()
    assert lost == [f"{MTP}enable_rollout=True"]
    assert "rollout.engine_args.speculative_config" in why


def test_ppo_with_megatron(tmp_path: Path) -> None:
    recipe = translated(tmp_path, verl_scripts.PPO)
    assert values(recipe, "critic.", "algorithm.adv", "algorithm.kl", "megatron.", "rollout.") == {
        "algorithm.advantage": "gae",
        "algorithm.advantage_options.gamma": 1.0,
        "algorithm.advantage_options.gae_lambda": 0.95,
        "algorithm.kl_in": "reward",
        "algorithm.kl_coefficient": 0.01,
        "algorithm.kl_estimator": "k1",
        "megatron.pipeline_model_parallel_size": 2,
        "megatron.recompute_granularity": "full",
        "megatron.recompute_method": "uniform",
        "megatron.recompute_num_layers": 1,
        "megatron.lr": 1e-3,
        "megatron.weight_decay": 0.01,
        "megatron.clip_grad": 1.0,
        # verl's critic is not cut as the policy is, where nothing is said.
        "critic.megatron.pipeline_model_parallel_size": 1,
        "critic.megatron.lr": 1e-2,
        "critic.megatron.weight_decay": 0.01,
        "critic.megatron.clip_grad": 1.0,
        "critic.value_clip": 0.5,
        "critic.warmup_steps": 1,
        "rollout.engine": "vllm",
        "rollout.replicas": 1,
        "rollout.max_response_tokens": 8,
        "rollout.engine_args.tensor_parallel_size": 2,
        "rollout.engine_args.gpu_memory_utilization": 0.5,
        "rollout.engine_args.max_model_len": 32,
        "rollout.engine_args.dtype": "float32",
        "rollout.engine_args.block_size": 32,
        "rollout.engine_args.kv_cache_memory_bytes": 8388608,
    }
    assert recipe.get("cluster.pools.all.roles") == ["trainer", "engine", "critic"]


@pytest.mark.parametrize(
    ("given", "argument", "tokens"),
    [
        ([], "max_model_len", 1024 + 4096),
        ([f"{ROLLOUT}name=sglang"], "context_length", 1024 + 4096),
        ([f"{ROLLOUT}max_model_len=null"], "max_model_len", 1024 + 4096),
        ([f"{ROLLOUT}max_model_len=9000"], "max_model_len", 9000),
        ([f"+{ROLLOUT}engine_kwargs.vllm.max_model_len=9000"], "max_model_len", 9000),
    ],
)
def test_an_engine_has_room_for_the_longest_sequence_alone(given: list[str], argument: str, tokens: int) -> None:
    recipe = from_verl([*PPO_KEYS, "data.max_prompt_length=1024", "data.max_response_length=4096", *given], {})
    assert recipe.get(f"rollout.engine_args.{argument}") == tokens


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], ["strategy=fsdp"]),
        (["strategy=fsdp2"], ["strategy=fsdp2"]),
        (["strategy=megatron"], []),
        (["megatron.tensor_model_parallel_size=2"], []),
    ],
)
def test_whole_weights_where_verl_cuts_them_are_said(given: list[str], shown: list[str]) -> None:
    recipe = from_verl([ACTOR + each for each in given] or ["data.seed=1"], {})
    assert said(recipe.absent) == [ACTOR + each for each in shown]
    assert all("megatron.use_torch_fsdp2=true" in why for why in recipe.absent)


@pytest.mark.parametrize("key", ["quantization", "quantization.weight_dtype"])
def test_weights_of_engines_in_fp8_are_blocks_here(key: str) -> None:
    keys_and_values = f"{ROLLOUT}quantization.kv_cache_dtype=fp8"
    recipe = from_verl([*PPO_KEYS, f"+{ROLLOUT}{key}=fp8", f"+{keys_and_values}"], {})
    assert recipe.get("rollout.weights") == "fp8_block"
    ((why, lost),) = recipe.absent.items()
    assert lost == [keys_and_values]
    assert "rollout.engine_args.kv_cache_dtype" in why


@pytest.mark.parametrize("name", verl_scripts.SCRIPTS)
def test_the_output_of_the_command_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "run.sh").write_text(verl_scripts.SCRIPTS[name])
    assert main(["config", "--from-verl", str(tmp_path / "run.sh")]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    config = compose("mine", (), str(tmp_path))
    assert (config.loop.steps, config.cluster.pools["all"].shared) == (2, True)


def test_overrides_and_yaml_are_taken_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=5", "trainer.total_training_steps=3"]
    assert main(["config", "--from-verl", *overrides, "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    groups = {"algorithm": {"adv_estimator": "rloo"}, "actor_rollout_ref": {"rollout": {"n": 5}}}
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump({**groups, "trainer": {"total_training_steps": 3}}))
    assert from_verl([str(file)], {}).values == recipe
    assert recipe["algorithm"]["advantage"] == "rloo"
    assert recipe["loop"]["samples_per_prompt"] == 5
    # verl's own default.
    assert recipe["loop"]["prompts_per_step"] == 1024


# Two of verl's own examples have a comment in the middle, behind which nothing reaches the program.


@pytest.mark.parametrize("merge", [True, False])
def test_whether_an_adapter_is_merged_for_the_engines_is_asked_as_there(merge: bool) -> None:
    given = [f"actor_rollout_ref.model.lora.{each}" for each in ("rank=8", f"merge={merge}")]
    recipe = from_verl([*given, MEGATRON], {})
    assert recipe.get("lora.rank") == 8
    assert recipe.get("lora.merge") is merge
    assert recipe.absent == {}


@pytest.mark.parametrize(
    ("given", "alpha"),
    [(["rank=8"], 16), (["rank=8", "alpha=32"], 32), ([], None), (["rank=8", "adapter_path=/a"], None)],
)
def test_an_adapter_has_the_scale_that_it_has_there(given: list[str], alpha: int | None) -> None:
    recipe = from_verl([f"actor_rollout_ref.model.lora_{each}" for each in given] or ["data.seed=1"], {})
    assert recipe.get("lora.alpha") == alpha
    assert recipe.get("megatron.transformer_impl") == ("local" if given else None)


def test_the_critic_has_its_own_optimizer() -> None:
    names = {
        "lr_warmup_steps": 10,
        "weight_decay": 0.1,
        "min_lr": 1e-7,
        "lr_decay_style": "cosine",
        "betas": [0.8, 0.9],
    }
    actor = [f"{ACTOR}optim.{name}={value}" for name, value in names.items()]
    options = [f"+{ACTOR}optim.override_optimizer_config.adam_eps=1e-6", f"{ACTOR}grad_clip=0.5"]
    recipe = from_verl([*PPO_KEYS, *actor, *options, "critic.grad_clip=0.3"], {})
    assert recipe.absent == {}
    assert values(recipe, "critic.megatron.") == {
        "critic.megatron.lr": 1e-5,
        "critic.megatron.weight_decay": 0.01,
        "critic.megatron.clip_grad": 0.3,
        "critic.megatron.lr_warmup_steps": 0,
        "critic.megatron.min_lr": 0.0,
        "critic.megatron.lr_decay_style": "constant",
        "critic.megatron.adam_beta1": 0.9,
        "critic.megatron.adam_beta2": 0.999,
        "critic.megatron.adam_eps": 1e-8,
    }


@pytest.mark.parametrize("kind", ["", "seq_aux_loss"])
def test_a_loss_of_balance_counts_where_its_kind_is_named(kind: str) -> None:
    """verl's bridges set the kind to none."""
    below = f"+{ACTOR}megatron.override_transformer_config."
    named = [f"{below}moe_router_load_balancing_type={kind}"] if kind else []
    recipe = from_verl([*PPO_KEYS, f"{below}moe_aux_loss_coeff=0.01", *named], {})
    check(recipe)
    assert recipe.get("megatron.moe_aux_loss_coeff") == (0.01 if kind else None)
    assert said(recipe.absent) == ([] if kind else [f"{below[1:]}moe_aux_loss_coeff=0.01"])
