"""A recipe at the tiny scale: its sizes, its model, and what a command line says beside it."""

import json

import pytest
from file_sizes import files_up_to

from converters.architectures import read_architecture
from converters.copying import check_checkpoint
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.output.lock import sole_writer
from megarl.quickstart.scale import MOST_RANKS, family_of, model_fields, tiny, write_inputs
from megarl.rollout import engine_kind

OPEN = ("model.path=m", "output_dir=o")


def sizes(changed, group="megatron"):
    found = [changed[f"{group}.{kind}_model_parallel_size"] for kind in ("tensor", "pipeline", "expert")]
    return [*found, changed[f"{group}.context_parallel_size"]]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("grpo_deepseek_v3", [2, 2, 2, 1]),
        ("dapo_qwen2_5_32b", [2, 1, 1, 2]),
        ("grpo_qwen3_moe", [2, 1, 2, 1]),
        ("grpo_qwen3_1_7b", [1, 1, 1, 1]),
    ],
)
def test_each_kind_of_parallelism_is_there_in_two(recipe, expected):
    changed = tiny(compose(recipe, OPEN))
    assert sizes(changed) == expected
    assert changed["cluster.trainer_ranks"] == (1 if expected == [1, 1, 1, 1] else MOST_RANKS)
    assert changed["model.name"] is None


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("vllm", {"tensor_parallel_size": 8}, {"max_model_len": 32, "tensor_parallel_size": 2}),
        ("vllm", {"nnodes": 2, "max_model_len": 9999}, {"max_model_len": 32, "nnodes": 1}),
        ("sglang", {"tp_size": 8, "ep_size": 8}, {"context_length": 32, "tp_size": 2, "ep_size": 2}),
        ("transformers", {}, {"max_model_len": 32}),
    ],
)
def test_an_engine_is_made_small_by_its_own_arguments(engine, given, expected):
    config = compose("grpo_qwen3_moe", OPEN)
    config.rollout.engine, config.rollout.engine_args = engine, given
    changed = tiny(config)
    prefix = "rollout.engine_args."
    arguments = {key.removeprefix(prefix): value for key, value in changed.items() if key.startswith(prefix)}
    assert arguments == expected
    engine_kind(engine).check({**given, **arguments})


def test_a_critic_has_its_own_sizes():
    changed = tiny(compose("ppo_qwen3_moe", OPEN))
    assert (changed["critic.ranks"], sizes(changed, "critic.megatron")) == (2, [2, 1, 2, 1])


def test_the_model_has_the_layers_of_its_stages_and_sizes_of_its_format():
    config = compose("grpo_deepseek_v3", [*OPEN, "megatron.pipeline_model_parallel_size=2"])
    config.megatron |= {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}
    fields = model_fields(config, family_of(config))
    assert fields["num_hidden_layers"] == 3
    assert all(fields[name] % 256 == 0 for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"))


def test_a_command_line_wins_over_the_scale(capsys):
    given = ["grpo_kimi_k2", "+scale=tiny", "loop.steps=5", "--lr", "1e-3"]
    assert main(["config", "--config-name", *given, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["configuration"]
    assert settings["loop.steps"] == {"value": 5, "origin": "override"}
    assert settings["megatron.lr"]["value"] == 1e-3
    assert settings["rollout.replicas"] == {"value": 1, "origin": "scale=tiny"}
    assert settings["output_dir"]["value"] == "runs/tiny_grpo_kimi_k2"
    assert settings["rollout.weights"]["value"] == "fp8_block"


def test_what_has_no_tiny_scale_is_said(capsys):
    assert main(["config", "--config-name", "grpo_kimi_k2", "+scale=small"]) == 2
    assert "megarl: +scale=small is not known: there is +scale=tiny" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^\+scale=tiny makes a small model .* and this recipe has no model\.name$"):
        tiny(compose("quickstart", [*OPEN, "data.train_files=[t]"]))


@pytest.fixture
def config(tmp_path):
    return compose("grpo_deepseek_v3", ["model.path=m", f"output_dir={tmp_path / 'run'}"])


@pytest.mark.parametrize("most_bytes", [2**9, 2**12, 2**17])
def test_inputs_that_a_full_disk_cut_short_are_written_again(config, tmp_path, most_bytes):
    output = tmp_path / "run"
    with files_up_to(most_bytes), pytest.raises(Exception, match=r"(?i)file too large"):
        write_inputs(config, "deepseek_v3")
    write_inputs(config, "deepseek_v3")
    assert {path.name for path in (output / "tiny").iterdir()} == {"model", "data"}
    whole = {path.name for path in (output / "tiny").rglob("*")}
    assert whole >= {"config.json", "model.safetensors", "tokenizer.json", "train.parquet", "pairs_eval.parquet"}
    check_checkpoint(checkpoint := HuggingFaceCheckpoint(output / "tiny/model"), read_architecture(checkpoint.config))


def test_inputs_that_another_run_may_be_reading_are_left_alone(config, tmp_path):
    with sole_writer(tmp_path / "run"), pytest.raises(UserError, match="another run is writing"):
        write_inputs(config, "deepseek_v3")
    config.output_dir = ""
    with pytest.raises(UserError, match="output_dir='' is no name"):
        write_inputs(config, "deepseek_v3")
