"""`megarl rehearse`: the table of a job, and one sentence where a rank does not fit."""

import json
from pathlib import Path

import pytest

from converters.architectures import Architecture, read_architecture
from converters.boxes import Box
from converters.formats.safetensors import CONFIG, read_json
from megarl.cli.main import main
from megarl.quickstart.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


def sizes(architecture: Architecture) -> list[Box]:
    return [Box.whole(shape) for shape in architecture.hf_shapes.values()]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--gpu-memory 80", "a GPU of --gpu-memory 80 has nothing left when --keep-free 4GB is kept free"),
        ("--gpus-per-node 0", "--gpus-per-node 0 is too small; give at least 1"),
        ("--nodes -3", "--nodes -3 is too small; give at least 1"),
        ("rollout.weights=fp9", "rollout.weights=fp9 is none of as_trained, fp8_block"),
        ("rollout.replicas=0", "rollout.replicas=0 is too small"),
        ("--prediction-layers -1", "--prediction-layers -1 is too small; give at least 0"),
        (
            "--model qwen3_30b_a3b --prediction-layers 1",
            "--prediction-layers 1 is for another model: a qwen3_moe model",
        ),
        ("--model qwen3_8", "--model qwen3_8 is no config.json, no folder with one and none of deepseek_v3, "),
        ("model.path=nowhere", "model.path nowhere is no config.json, no folder with one and none of deepseek_v3, "),
        ("+scale=tiny", "+scale=tiny is for the commands that train: megarl plan and rehearse count a recipe at its"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_is_built(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "--config-name", "grpo_qwen3_moe", *given.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("megatron.lr=null", "megatron.lr is not set"),
        ("loop.max_tokens_per_micro_batch=1024", "does not fit in loop.max_tokens_per_micro_batch=1024"),
        ("loop.prompts_per_step=63 algorithm.updates_per_step=2", "cannot be cut into algorithm.updates_per_step=2"),
        ("loop.samples_per_prompt=1", "loop.samples_per_prompt=1 with algorithm.advantage=grpo"),
        ("schedule.max_staleness=1 schedule.in_flight=keep rollout.engine=sglang ~rollout.engine_args", "=keep has"),
        ("refit.path=loader refit.delta=true", "refit.delta=true is for direct refits"),
        ("cluster.gpu_share=0.5", "cluster.gpu_share=0.5 puts a rank and an engine on one GPU"),
        ("critic.ranks=2", "critic.ranks is set, but algorithm.advantage=grpo has no critic"),
        ("algorithm.router_replay=rollout", "algorithm.router_replay=rollout sends tokens to the experts that"),
        ("model.freeze_moe_router=true", "model.freeze_moe_router is for routers, and this qwen3 model has none"),
        ("megatron.tensor_model_parallel_size=3 cluster.trainer_ranks=3", "cannot be divided by tensor_model"),
        ("+rollout.engine_args.tensor_parallel_size=3", "divided by rollout.engine_args.tensor_parallel_size = 3"),
        ("model.path=qwen3_8b", "the recipe is for qwen3_1_7b, which has"),
        ("lora.rank=1024 lora.merge=false", "takes a rank of at most 512"),
        ("reward_model.path=/models/judge", "reward_model.path /models/judge is no config.json, no folder with one"),
        ("sft.steps=7", "megarl rehearse counts a step of megarl train, with its engines and its refit, and recipe"),
    ],
)
def test_a_job_that_a_run_would_refuse_is_refused_before_anything_is_built(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "--config-name", "grpo_qwen3_1_7b", *given.split()]) == 2
    assert says in capsys.readouterr().err


def test_an_engine_that_cannot_be_counted_is_refused_with_the_name_of_this_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["~rollout.engine_args", "+rollout.engine_args.tp_size=4", "+rollout.engine_args.ep_size=2"]
    given = ["--config-name", "quickstart", "--model", str(folder), "rollout.engine=sglang", *arguments]
    assert main(["rehearse", *given]) == 2
    assert "which megarl rehearse does not know: set it to 1 or to tp_size for megarl" in capsys.readouterr().err


@pytest.mark.long
def test_a_job_that_does_not_fit_is_refused_with_the_knobs_that_help(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["rehearse", "--config-name", "quickstart", "--model", str(folder), "--keep-free", "1kB", "--json"]
    assert main([*given, "--gpu-memory", "1MB", "--gpus-per-node", "1", "--nodes", "1"]) == 1
    said = capsys.readouterr()
    # Too few machines are told of before the minutes that a rehearsal takes.
    before, _, after = said.err.partition("rehearsing ranks and an engine")
    assert before.startswith("megarl: not placed: ")
    assert before.endswith("; what each rank needs is rehearsed all the same\n")
    assert "not placed" not in after
    facts = json.loads(said.out)
    assert facts["placed"].startswith("not placed: ")
    needs = {(need["role"], need["phase"]): need for need in facts["needs"]}
    assert set(needs) == {
        *(("trainer", phase) for phase in ("predictions", "update", "refit")),
        *(("engine", phase) for phase in ("longest response", "rollout")),
    }
    need = needs["trainer", "update"]
    assert need["who"] == "stage 0, 2 ranks"
    assert need["total"] == sum(need["parts"].values()) == 999_000 - need["free"]
    # Two layers, keys and values, 32 tokens, in float32.
    heads = read_json(folder / CONFIG)
    width = heads["num_key_value_heads"] * heads["head_dim"]
    assert needs["engine", "longest response"]["parts"]["keys and values"] == 2 * 2 * 32 * width * 4
    # One engine of one worker gets every weight, each from one rank.
    architecture = read_architecture(heads)
    assert facts["refit"]["sent"] == sum(each.size for each in sizes(architecture)) * 4
    assert needs["trainer", "refit"]["parts"]["buckets"] == facts["refit"]["of_ranks"]["0"] > 0
    assert "more than there is on a GPU of 1MB with 1kB kept free" in said.err
    assert "megarl: trainer (stage 0, 2 ranks) needs" in said.err
    assert "loop.max_tokens_per_micro_batch" in said.err or "megatron.optimizer_cpu_offload" in said.err
