"""Values that contradict each other or their meaning are refused, each with its reason."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.config.megatron import megatron_options
from megarl.config.validate import validate
from megarl.schema import MegarlConfig, RewardModelConfig, TeacherConfig


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., MegarlConfig]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.parquet").touch()
    given = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out"]
    files = [f"{key}=[{tmp_path}/data.parquet]" for key in ("data.train_files", "data.eval_files", "sft.train_files")]
    return lambda *overrides: compose("quickstart", [*given, *files, *overrides])


def test_the_quickstart_is_valid(make_config: Callable[..., MegarlConfig]) -> None:
    for command in ("train", "sft", "eval", "chat"):
        validate(make_config(), command)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["loop.samples_per_prompt=1"],
            "samples_per_prompt=1 .*group of one .*nothing would be learned; use 2 or more",
        ),
        (
            ["cluster.pools.a={roles: [trainer, critic], nodes: 1, shared: true}"],
            r"cluster\.pools\.a\.shared=true lets trainer and engines take turns, and engine is not in",
        ),
        (
            [
                "cluster.pools.a={roles: [trainer, engine], nodes: 1, shared: true}",
                "rollout.engine_args={enable_sleep_mode: false}",
            ],
            r"rollout\.engine_args\.enable_sleep_mode=false keeps the engines' memory from the trainer",
        ),
        (["megatron.exp_avg_dtype=fp8"], r"megatron\.exp_avg_dtype=fp8 is not supported: .*; use fp32 or bf16"),
        (["cluster.object_store_bytes=1000"], "cluster.object_store_bytes=1000 is too small: .* at least 78643200"),
        (
            ["cluster.object_store_bytes=1000000000", "cluster.address=auto"],
            r"cluster\.object_store_bytes .* cluster\.address .*--object-store-memory",
        ),
        (["cluster.device_memory_bytes=1000"], r"cluster\.device_memory_bytes limits .* no pool .* has shared=true"),
        (["cluster.pools.a={roles: [trainer], nodes: 0}"], r"cluster\.pools\.a\.nodes=0 is too small"),
        (["cluster.pools.a={roles: [trainer], nodes: 1, gpus: 0}"], r"cluster\.pools\.a\.gpus=0 is too small"),
        (["cluster.pools.a={roles: [], nodes: 1}"], r"cluster\.pools\.a\.roles is empty: name those that have"),
        (
            ["cluster.pools.a={roles: [engines], nodes: 1}"],
            r"pools\.a\.roles has engines, which is none of trainer, .* did you mean engine",
        ),
        (
            ["cluster.pools={a: {roles: [trainer], nodes: 1}, b: {roles: [trainer], nodes: 1}}"],
            "trainer is named 2 times in cluster.pools: name each role once",
        ),
        (
            ["cluster.pools.a={roles: [trainer], nodes: 1}", "cluster.gpu_share=0.5"],
            r"cluster\.gpu_share=0\.5 puts a rank and an engine on one GPU, .*leave one of the two out",
        ),
        (["algorithm.updates_per_step=3"], "prompts_per_step=64 cannot be cut into algorithm.updates_per_step=3"),
        (["loop.max_tokens_per_micro_batch=23"], "= 24 does not fit .*raise the latter to 24"),
        (["model.dtype=fp16"], "model.dtype=fp16 is none of bf16, fp32; did you mean"),
        (["rollout.engine=vlm"], "rollout.engine=vlm .*did you mean vllm"),
        (["algorithm.advantage=ppo"], "algorithm.advantage='ppo' is not known"),
        (["algorithm.policy_loss=clp"], "did you mean clip"),
        (["algorithm.aggregation=mean"], "algorithm.aggregation='mean' is not known"),
        (["algorithm.kl_estimator=k9"], "algorithm.kl_estimator='k9'"),
        (["reward.on_error=ignore"], "reward.on_error=ignore is none of drop, stop"),
        (
            ["refit.delta=true", "refit.path=loader"],
            "^refit.delta=true is for direct refits, and refit.path=loader allows none: set refit.path to auto, or ",
        ),
        (
            ["refit.transport=rdma", "refit.path=loader"],
            "^refit.transport=rdma is for direct refits, and refit.path=loader allows none: set refit.path to auto, or "
            "refit.transport to auto$",
        ),
        (
            ["refit.transport=shared_memory", "rollout.weights=nvfp4"],
            "^refit.transport=shared_memory is for direct refits, and engines take rollout.weights=nvfp4 through their",
        ),
        (
            ["refit.delta=true", "rollout.weights=nvfp4"],
            "^refit.delta=true is for direct refits, and engines take rollout.weights=nvfp4 through their own loader",
        ),
        (
            ["refit.path=direct", "rollout.weights=nvfp4"],
            "^refit.path=direct is for direct refits, and engines take rollout.weights=nvfp4 through their own loader",
        ),
        (["data.overlong_prompts=cut"], "data.overlong_prompts=cut"),
        (["checkpoint.resume=yes"], "checkpoint.resume"),
        (["tracking.loggers=[console,wandbb]"], "tracking.loggers=wandbb .*did you mean wandb"),
        (["loop.steps=0"], "loop.steps=0 is too small: it must be at least 1"),
        (["sft.eval_every=0"], "sft.eval_every=0"),
        (["rollout.temperature=0"], "rollout.temperature=0.0 .*at least 0.01"),
        (["loop.eval_temperature=0.009"], "loop.eval_temperature=0.009 .*at least 0.01"),
        (
            ["refit.bucket_bytes=4294967297"],
            "refit.bucket_bytes=4294967297 is too large: it must be at most 4294967296",
        ),
        (["sft.stop_at_exact_match=30"], "sft.stop_at_exact_match=30.0 is too large: it must be at most 1"),
        (["sft.stop_at_exact_match=-1"], "sft.stop_at_exact_match=-1.0 is too small: it must be at least 0"),
        (["rollout.top_p=1.5"], "rollout.top_p=1.5 is too large"),
        (["algorithm.policy_loss_options.clip_low=2"], "clip_low must be above 0 and at most 1, not 2"),
        (["rollout.top_k=0"], "rollout.top_k=0"),
        (["algorithm.kl_coefficient=-1"], "algorithm.kl_coefficient must be at least 0, not -1"),
        (["model.path=nowhere"], "model.path=nowhere is not a HuggingFace folder"),
        (["data.train_files=[]"], "data.train_files is empty"),
        (["data.train_files=[gone.parquet]"], "there is no file gone.parquet"),
        (["data.train_files=[.]"], r"data.train_files: \. is a folder; name the files in it one by one"),
        (["data.train_files=['*.parquet']"], r"there is no file \*.parquet, and patterns are not filled in"),
        (["data.eval_files=[gone.parquet]"], "data.eval_files: there is no file gone.parquet"),
        (["megatron.tensor_model_parallel_size=4"], "2 ranks cannot be divided"),
        (
            ["megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=false"],
            "sequence_parallel=False with megatron.tensor_model_parallel_size=2: .* leave it out",
        ),
        (["megatron.context_parallel_size=4"], "2 ranks cannot be divided by tensor_model_parallel_size x context_par"),
        (
            ["megatron.context_parallel_size=2", "loop.shared_prefixes=true"],
            r"loop\.shared_prefixes needs whole sequences .*context_parallel_size=2 cuts them: choose one of the two",
        ),
        (["megatron.moe_aux_loss_coeff=0.01"], "moe_aux_loss_coeff=0.01 asks for none, which balances nothing: set"),
        (["megatron.moe_aux_loss_coeff=[0.0,0.1]"], "moe_aux_loss_coeff"),
        (["megatron.lr_warmup_steps=5", "megatron.lr_decay_steps=5"], "lr_warmup_steps=5 leaves no step of .*=5"),
        (["megatron.moe_z_loss_coeff=-1e-3"], "moe_z_loss_coeff=-0.001 must not be negative"),
        (
            ["schedule.max_staleness=1", "schedule.window=8", "loop.prompts_per_step=4"],
            r"schedule\.window=8 .* looks beyond the 8 prompts .*: set it to 5 at most, or raise max_staleness",
        ),
        (["schedule.in_flight=drop"], r"schedule\.in_flight=drop is none of keep, recompute, wait"),
        (
            ["schedule.in_flight=keep", "rollout.engine=sglang"],
            r"schedule\.in_flight=keep has engines let responses keep .* and SGLang does not: set it to recompute",
        ),
        (
            ["schedule.max_staleness=2", "schedule.corrected=false"],
            r"trains on tokens that are several versions old, and nothing corrects for it: set algorithm\.corrections",
        ),
        (
            ["schedule.max_staleness=1", "rollout.top_p=0.9"],
            r"algorithm\.corrections, which schedule\.max_staleness=1 turns on, with rollout\.top_p=0\.9: .* sample "
            r"from all tokens with rollout\.top_p=1\.0, or do without with schedule\.corrected=false$",
        ),
        (
            ["schedule.max_staleness=2", "rollout.top_k=50", "+algorithm=gspo"],
            r"which schedule\.max_staleness=2 turns on, with rollout\.top_k=50: .*, or do without with schedule\."
            r"max_staleness=1 and schedule\.corrected=false$",
        ),
        (
            [
                "schedule.max_staleness=1",
                "rollout.top_p=0.9",
                "algorithm.corrections=[{kind: token_band, low: 0.5, high: 2}]",
            ],
            r"^algorithm\.corrections with rollout\.top_p=0\.9: .*, or leave the former out$",
        ),
        (
            ["schedule.in_flight=keep", "cluster.pools={all: {roles: [trainer, engine], nodes: 1, shared: true}}"],
            r"in_flight=keep has engines keep keys and values while .*, and cluster\.pools has them give that memory",
        ),
        (["rollout.kv_scales=bond"], "rollout.kv_scales=bond is none of bound, unit; did you mean bound"),
        (["rollout.kv_scales=bound"], r"rollout\.engine_args\.kv_cache_dtype is not set: set that to fp8"),
        (
            ["rollout.kv_scales=bound", "rollout.engine_args.kv_cache_dtype=fp8", "schedule.in_flight=keep"],
            r"in_flight=keep .* and rollout\.kv_scales=bound would read them by the scales of newer ones",
        ),
        (["lora.alpha=8"], r"lora\.alpha is set, and with lora\.rank=0 no adapter is trained"),
        (["lora.rank=-1"], r"lora\.rank=-1 is too small"),
        (["lora.rank=4", "lora.target_modules=[]"], r"lora\.target_modules is empty: name modules such as q_proj"),
        (["lora.path=/nowhere"], "/nowhere/adapter_config.json is missing; give the folder of a PEFT adapter"),
        (["rollout.weights=fp8"], r"^rollout\.weights=fp8 is none of .*; did you mean fp8_block\?"),
        (["rollout.weights=int8"], r"^rollout\.weights=int8 is none of .*; did you mean int8_channel\?"),
        (["rollout.weights=fp8_blok"], r"^rollout\.weights=fp8_blok is none of .*; did you mean fp8_block\?"),
        (
            ["lora.rank=4", "algorithm.kl_coefficient=0.1", "algorithm.refresh_reference_every=2"],
            "the reference is the model without its adapter: leave out one of the two",
        ),
        (["lora.rank=4", "megatron.moe_router_bias_update_rate=0.001"], "changes the routers of the model beside it"),
        (["lora.merge=false"], r"lora\.merge is set, and with lora\.rank=0 no adapter is trained"),
        (
            ["lora.rank=4", "lora.merge=false", "refit.path=direct"],
            r"alone, .*, and refit\.path=direct is for weights",
        ),
        (
            ["lora.rank=4", "lora.merge=false", "refit.delta=true"],
            r"alone, .*, and refit\.delta=true is for weights",
        ),
        (
            ["lora.rank=4", "lora.merge=false", "refit.transport=tcp"],
            r"alone, .*, and refit\.transport=tcp is for weights",
        ),
        (
            ["lora.rank=4", "lora.merge=false", "model.megatron_checkpoint=elsewhere"],
            r"with model\.megatron_checkpoint it is trained beside others: export that to HuggingFace as model\.path",
        ),
    ],
)
def test_training_is_refused(make_config: Callable[..., MegarlConfig], overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate(make_config(*overrides), "train")


@pytest.mark.parametrize(
    "override",
    [
        "megatron.moe_aux_loss_coeff=0.0",
        "megatron.moe_z_loss_coeff=null",
        "rollout.top_k=5",
        "algorithm.updates_per_step=2",
        "schedule.max_staleness=1",
        "schedule.max_staleness=3",
        "schedule.max_staleness=1 schedule.corrected=false rollout.top_p=0.9",
    ],
)
def test_training_is_allowed(make_config: Callable[..., MegarlConfig], override: str) -> None:
    validate(make_config(*override.split()), "train")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused(make_config: Callable[..., MegarlConfig], name: str) -> None:
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"^tracking\.loggers names '{name}', which is not installed; install it with"):
        validate(make_config(f"tracking.loggers=[jsonl,{name}]"), "train")


@pytest.mark.parametrize(
    ("overrides", "command", "says"),
    [
        (
            ["data.train_files=[]", "sft.steps=7"],
            "train",
            r"^data\.train_files is empty, and this recipe is for megarl sft:",
        ),
        (
            ["data.train_files=[]", "sft.train_files=[]", "preference.steps=7"],
            "train",
            r"this recipe is for megarl dpo, reward-model or spin: run that, or name at least one parquet file",
        ),
        (["sft.train_files=[]"], "sft", r"^sft\.train_files is empty, and this recipe is for megarl train: run that"),
        (["sft.steps=7"], "reward-model", r"^preference\.train_files is empty, and this recipe is for megarl sft:"),
    ],
)
def test_a_recipe_for_another_command_says_which(
    make_config: Callable[..., MegarlConfig], overrides: list[str], command: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        validate(make_config(*overrides), command)


def test_fine_tuning_and_evaluation_need_files_of_their_own(make_config: Callable[..., MegarlConfig]) -> None:
    with pytest.raises(UserError, match=r"sft\.train_files is empty"):
        validate(make_config("sft.train_files=[]"), "sft")
    with pytest.raises(UserError, match=r"data\.eval_files is empty"):
        validate(make_config("data.eval_files=[]"), "eval")
    validate(make_config("data.train_files=[]", "loop.samples_per_prompt=1"), "sft")


def test_options_of_megatron_arrive_where_they_belong(make_config: Callable[..., MegarlConfig]) -> None:
    options = megatron_options(make_config("megatron.clip_grad=0.5", "megatron.lr_warmup_steps=3", "model.dtype=bf16"))
    assert (options.parallel.world_size, options.parallel.expert_model_parallel_size) == (2, 2)
    assert options.params_dtype == torch.bfloat16
    assert options.optimizer["clip_grad"] == 0.5
    assert options.scheduler.items() >= {"lr_warmup_steps": 3}.items()
    assert options.transformer == {}


@pytest.mark.parametrize("model", [TeacherConfig("t"), RewardModelConfig("r")])
def test_a_model_that_never_trains_has_no_steps_to_take_scales_from(
    make_config: Callable[..., MegarlConfig], model: TeacherConfig | RewardModelConfig
) -> None:
    config = make_config("+megatron.fp8=hybrid", "model.dtype=bf16")
    assert megatron_options(config).scales_by_history
    assert megatron_options(config, config.critic).scales_by_history
    assert megatron_options(config, config.implicit_reward_model).scales_by_history
    with pytest.raises(UserError, match=r"^megatron\.fp8=hybrid with fp8_recipe=delayed, the default, .* take none"):
        megatron_options(config, model)
    for own in ({"fp8_recipe": "tensorwise"}, {"fp8": None}):
        assert not megatron_options(config, replace(model, megatron=own)).scales_by_history
    assert megatron_options(make_config("+megatron.fp8=hybrid", "+megatron.fp8_recipe=tensorwise"), model)


@pytest.mark.parametrize("training", ["detached", "joint", "none"])
def test_prediction_layers_of_the_policy_alone_train(make_config: Callable[..., MegarlConfig], training: str) -> None:
    config = make_config(f"model.mtp_training={training}")
    assert megatron_options(config).mtp_training == training
    beside = config.critic, config.implicit_reward_model, RewardModelConfig("r"), TeacherConfig("t")
    assert [megatron_options(config, model).mtp_training for model in beside] == ["none"] * 4


MASK = "{kind: token_band, low: 0.5, high: 2}"


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["schedule.max_staleness=1"], ["token_importance"]),
        (["schedule.max_staleness=1", "+algorithm=gspo"], ["sequence_mean_importance"]),
        (["schedule.max_staleness=1", "schedule.corrected=false"], []),
        (["schedule.max_staleness=1", "algorithm.ratio_to=rollout"], []),
        (["schedule.max_staleness=1", f"algorithm.corrections=[{MASK}]"], ["token_band", "token_importance"]),
        (["schedule.max_staleness=1", f"algorithm.corrections=[{MASK}]", "algorithm.ratio_to=rollout"], ["token_band"]),
        (["schedule.max_staleness=1", "algorithm.corrections=[{kind: icepop, low: 0.5, high: 2}]"], ["icepop"]),
        ([], []),
    ],
)
def test_staleness_is_corrected_for_unless_something_else_does(make_config, overrides, kinds) -> None:
    config = make_config(*overrides)
    assert [each.kind for each in config.algorithm.corrections] == kinds
    validate(config, "train")
