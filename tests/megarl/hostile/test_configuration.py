"""Values, keys, flags and recipes."""

import argparse
import os
import random
from dataclasses import fields, is_dataclass
from typing import get_args, get_origin

import pytest

from megarl.cli.parser import CommandParser
from megarl.cli.recipe import read_config
from megarl.config.keys import schema_keys
from megarl.config.validate import validate
from megarl.schema import MegarlConfig

REFUSED = {
    "loop.steps": "-1 abc 1.5 null ${oc.env:HOME} ${nope}",
    "loop": "1",
    "loop.nope": "1",
    "nope": "1",
    "loop.seed": "-1 null",
    "output_dir": "${oc.env:NOPE} '' null /etc/passwd /dev/null/x",
    "rollout.temperature": "nan inf -0.0",
    "rollout.top_p": "0 nan",
    "rollout.top_k": "0",
    "rollout.stop_token_ids": "[-5]",
    "rollout.engine_args": "{nope:1}",
    "rollout.engine_args.tensor_parallel_size": "two 0 1.5 null true",
    "rollout.engine_args.data_parallel_size": "zwei -1",
    "rollout.engine_args.pipeline_parallel_size": "0",
    "rollout.engine_args.gpu_memory_utilization": "1.5 0 nan much",
    "rollout.engine_args.max_num_seqs": "-1 many",
    "rollout.engine_args.max_model_len": "abc 0",
    "rollout.engine_args.dtype": "float8",
    "rollout.engine_args.quantization": "fp9",
    "rollout.engine_args.load_format": "zip",
    "rollout.engine_args.scheduling_policy": "best",
    "rollout.engine_args.enforce_eager": "1",
    "rollout.engine_args.logprobs_mode": "raw_logprobs",
    "rollout.engine_args.skip_tokenizer_init": "false",
    "rollout.engine_args.model": "other null",
    "rollout.engine_args.generation_config": "other null",
    "rollout.engine_args.override_generation_config": "{temperature:0}",
    "rollout.engine_args.enable_expert_parallel": "yes_please",
    "rollout.engine": "nope",
    "algorithm.policy_loss_options.clip_low": "nan",
    "algorithm.kl_coefficient": "inf -1",
    "algorithm.advantage": "GRPO",
    "algorithm.corrections": "[{kind:nope}]",
    "algorithm.advantage_options.normalize_by_std": "2",
    "critic.value_clip": "-0.5 0 nan",
    "critic.ranks": "0",
    "reward_model.ranks": "0",
    "implicit_reward_model.ranks": "0",
    "teachers": "{a:{path:there,ranks:0}}",
    "reward.workers": "0 1000000",
    "reward.async_samples": "0 1000000",
    "reward.timeout_s": "nan 1e400",
    "reward.overlong_penalty": "inf",
    "refit.bucket_bytes": "1 -1",
    "cluster.trainer_ranks": "3 1000000",
    "cluster.rendezvous_port": "99999 -1",
    "cluster.trainer_cpus": "nan",
    "checkpoint.every": "-1",
    "checkpoint.keep_last": "0",
    "checkpoint.resume": "maybe",
    "tracking.warn_truncated_fraction": "nan",
    "tracking.profile": "0 -1",
    "tracking.peak_tflops": "-989 0 inf",
    "data.shuffle": "maybe",
    "model.dtype": "fp16",
    "model.path": "/nonexistent '' null",
    "megatron.lr": "nan -1 abc inf [1] true",
    "megatron.weight_decay": "nan",
    "megatron.adam_beta2": "2",
    "megatron.adam_beta1": "-1",
    "megatron.clip_grad": "-1",
    "megatron.lr_decay_style": "zigzag",
    "megatron.nope": "1",
    "megatron.tensor_model_parallel_size": "0 -2",
    "megatron.lr_warmup_steps": "-5",
}
"""Key -> values that it must refuse, as they are given."""
ANY_NUMBER = (
    "algorithm.filter_low",
    "algorithm.filter_high",
    "reward_model.weight",
    "tracking.warn_entropy_fraction",
    "tracking.warn_kl_to_reference",
    "tracking.warn_kl_to_old",
    "tracking.warn_log_prob_difference",
    "tracking.warn_no_signal",
    "tracking.warn_truncated_fraction",
    "tracking.warn_timed_out_fraction",
    "tracking.warn_expert_imbalance",
)
"""Keys whose numbers have no smallest: rewards and their weights, and limits of warnings."""
OF_OTHER_COMMANDS = ("preference.beta", "preference.label_smoothing")
"""Keys whose range is in the objective of `megarl dpo` and `megarl spin`, and tested with them."""
MALFORMED = (
    "loop.steps",
    "loop.steps=",
    "=",
    "+algorithm=nope",
    "+algorithm=../../etc/passwd",
    "--lr=nan",
    "--lr=inf",
    "--lr",
    "--nope=5",
    "--lr=abc",
)
COMMAND_LINES = (*(f"{key}={value}" for key, values in REFUSED.items() for value in values.split()), *MALFORMED)
RECIPES = {
    "bad": b"a: [\n  - b: {\n",
    "binary": bytes(range(128, 256)),
    "circle": b"defaults: [circle, _self_]\n",
    "bomb": b"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n",
    "object": b"defaults: [quickstart, _self_]\noutput_dir: !!python/object/apply:os.system ['touch executed']\n",
    "target": b"defaults: [quickstart, _self_]\nmegatron:\n  _target_: os.system\n  command: touch executed\n",
    "list": b"- 1\n- 2\n",
}
VALUES = (
    *(
        "-1",
        "nan",
        "-inf",
        "''",
        "[1,2]",
        "{a: b}",
        "1e400",
        "null",
        "ö",
        "'ö'",
        "9" * 30,
        "${x}",
        "'\0'",
        "true",
        "[]",
    ),
    *("{_target_: os.system, _args_: [touch executed]}", "'!!python/object/apply:os.system [touch executed]'", "'*'"),
)


@pytest.fixture
def judge(hostile_model, hostile_files, refusal, tmp_path):
    def read_and_check(overrides, name="quickstart", folder=None):
        given = [f"model.path={hostile_model}", f"data.train_files=[{hostile_files.train}]", "data.eval_files=[]"]
        given += [f"output_dir={tmp_path / 'run'}", *overrides]
        options = argparse.Namespace(config_name=name, config_dir=folder, overrides=given, parser=CommandParser())
        validate(read_config(options), "train")

    return lambda *arguments: refusal(read_and_check, *arguments)


def test_what_is_right_is_taken(judge):
    assert judge([]) is None
    assert judge(["rollout.engine_args.max_model_len=null", "rollout.engine_args.max_num_seqs=null"]) is None


@pytest.mark.parametrize("override", COMMAND_LINES)
def test_a_value_that_cannot_be_is_refused(judge, override):
    assert judge([override])


def numeric_keys(group=MegarlConfig, prefix=""):
    """Keys of the schema whose value is a number."""
    for field in fields(group):
        if is_dataclass(field.type):
            yield from numeric_keys(field.type, f"{prefix}{field.name}.")
        elif {field.type, *get_args(field.type)} & {int, float} and get_origin(field.type) not in (list, dict):
            yield f"{prefix}{field.name}"


def test_the_keys_without_a_smallest_number_are_there():
    assert {*ANY_NUMBER, *OF_OTHER_COMMANDS} <= {*numeric_keys()}


@pytest.mark.parametrize("key", sorted({*numeric_keys()} - {*ANY_NUMBER, *OF_OTHER_COMMANDS}))
def test_every_other_number_has_a_smallest(judge, key):
    sentence = judge([f"{key}=-1000000000"])
    assert sentence is not None
    assert key in sentence
    assert "must be" in sentence


@pytest.mark.parametrize(
    "argument",
    [
        *("tp_size=two", "tp_size=0", "ep_size=-3", "mem_fraction_static=1.5", "max_running_requests=-1"),
        *("skip_tokenizer_init=false", "schedule_low_priority_values_first=false", "model_path=other"),
        *("dtype=float8", "context_length=abc", "disable_cuda_graph=maybe"),
    ],
)
def test_a_value_that_cannot_be_is_refused_also_where_the_engine_is_not_installed(judge, argument):
    name = argument.partition("=")[0]
    assert f"rollout.engine_args.{name}=" in judge(["rollout.engine=sglang", f"rollout.engine_args.{argument}"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_none_is_refused(judge, tmp_path, name):
    (tmp_path / f"{name}.yaml").write_bytes(RECIPES[name])
    assert judge([], name, str(tmp_path))


@pytest.mark.parametrize("name", ["nope", "../../etc/passwd", ""])
def test_a_recipe_that_is_not_there_is_refused(judge, name):
    assert judge([], name)


def test_a_value_outside_of_ascii_is_shown_in_quotes(judge):
    assert "\"output_dir='öut'\"" in judge(["output_dir=öut"])
    assert judge(["output_dir='öut'"]) is None


@pytest.mark.parametrize("seed", range(30))
def test_any_key_takes_any_value_or_refuses_it(judge, seed):
    draw = random.Random(seed)
    judge([f"{draw.choice(list(schema_keys()))}={draw.choice(VALUES)}"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_refused(judge, tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    assert judge([f"data.train_files=[{tmp_path / 'closed' / 'a.parquet'}]"])
