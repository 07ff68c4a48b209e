"""`megarl config`: what it prints is the recipe again, and a difference is told on one line for each key."""

import json
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.compose import compose

GIVEN = ["model.path=m", "output_dir=o"]


@pytest.mark.parametrize("name", ["quickstart_distillation", "gspo_qwen3_moe", "grpo_deepseek_v3"])
@pytest.mark.parametrize("given", [[], ["--given"]])
def test_the_output_is_a_recipe_with_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, given: list[str]
) -> None:
    overrides = [*GIVEN, "loop.steps=3", "rollout.engine_args.max_num_seqs=5", "tracking.run_name='a: b # c'"]
    assert main(["config", "--config-name", name, *given, *overrides, "--lr", "2e-6"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    teacher = ["teachers.sums.path=t"] if "distillation" in name else []
    expected = compose(name, [*overrides, "megatron.lr=2e-6", *teacher])
    assert compose("printed", teacher, str(tmp_path)) == expected


def test_each_line_says_where_its_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "--config-name", "quickstart_ppo", "loop.steps=3", "--lr", "1e-3"])
    lines = {line.split(":")[0].strip(): line.split(" # ")[-1] for line in capsys.readouterr().out.splitlines()}
    assert lines["steps_per_generation"] == "default"
    assert lines["output_dir"].startswith("configs/quickstart_ppo.yaml:")
    assert lines["value_clip"].startswith("configs/quickstart_ppo.yaml:")
    assert lines["gae_lambda"].startswith("configs/algorithm/ppo.yaml:")


def test_json_has_every_key_with_value_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config-name", "quickstart", "loop.steps=3", "--lr", "1e-3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["configuration"]
    assert found["loop.steps"] == {"value": 3, "origin": "override"}
    assert found["megatron.lr"] == {"value": 1e-3, "origin": "flag --lr"}


@pytest.mark.parametrize(
    ("override", "printed", "says"),
    [
        (
            "rollout.engine=vlm",
            "engine: vlm",
            "rollout.engine=vlm is none of sglang, transformers, vllm; did you mean vllm",
        ),
        (
            "algorithm.advantage=grop",
            "advantage: grop",
            "algorithm.advantage='grop' is not known; did you mean grpo?",
        ),
        ("algorithm.kl_estimator=k9", "kl_estimator: k9", "algorithm.kl_estimator='k9' is not known"),
        ("algorithm.kl_coefficient=-1", "kl_coefficient: -1", "algorithm.kl_coefficient must be at least 0"),
    ],
)
def test_a_value_that_no_run_takes_is_printed_and_refused(
    capsys: pytest.CaptureFixture[str], override: str, printed: str, says: str
) -> None:
    assert main(["config", "--config-name", "grpo_qwen3_moe", override, "--given"]) == 2
    said = capsys.readouterr()
    assert printed in said.out
    assert says in said.err


def test_a_difference_names_both_values_and_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [quickstart, _self_]\nloop: {steps: 9}\nrollout: {engine_args: {max_num_seqs: 2}}\n")
    assert main(["config", "--diff", "quickstart", str(mine), "loop.seed=5"]) == 1
    steps, engine, verdict = capsys.readouterr().out.splitlines()
    assert steps.startswith("loop.steps: 200 (configs/quickstart.yaml:")
    assert steps.endswith(f", 9 ({mine}:2)")
    assert engine == f"rollout.engine_args.max_num_seqs: not set, 2 ({mine}:3)"
    assert verdict == f"quickstart and {mine} differ in 2 keys"
    assert main(["config", "--diff", "quickstart", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart and quickstart are the same configuration\n"


def test_a_recipe_given_as_a_file_has_a_tiny_scale_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [grpo_qwen3_moe, _self_]\nloop: {steps: 9}\noutput_dir: o\n")
    assert main(["config", "--config-name", str(mine), "+scale=tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["configuration"]
    assert found["loop.steps"] == {"value": 2, "origin": "scale=tiny"}
    assert main(["config", "--diff", "grpo_qwen3_moe", str(mine), "+scale=tiny", "output_dir=o"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config-name", "nowhere"], "there is no recipe nowhere"),
        (["--diff", "quickstart", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["--config-name", "quickstart", "loop.stps=1"], "did you mean loop.steps?"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["config", *words]) == 2
    assert says in capsys.readouterr().err
