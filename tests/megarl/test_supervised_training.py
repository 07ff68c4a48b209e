"""Training on examples, as commands: each learns what it is for, on held-out data, and leaves a model that loads."""

import json
from pathlib import Path

import pytest
from echo_task import write_echo
from transformers import AutoModelForCausalLM

from megarl.cli.main import main
from megarl.cluster.runtime import ray_cluster
from megarl.config.schema import ClusterConfig
from megarl.quickstart.tiny_models import write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with ray_cluster(ClusterConfig()):
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny model, and files of the task."""
    folder = tmp_path_factory.mktemp("given")
    return write_tiny_model("qwen3", folder / "model", fields={"num_hidden_layers": 2}), write_echo(folder / "data")


def run(command: str, output: Path, given, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step of a run of `command` on the task."""
    model, files = given
    group, train, held_out = {
        "sft": ("sft", files.train, files.eval),
        "dpo": ("preference", files.pairs_train, files.pairs_eval),
        "reward-model": ("preference", files.pairs_train, files.pairs_eval),
    }[command]
    arguments = [
        *(command, "--config-name", f"quickstart_{command.replace('-', '_')}"),
        *(f"model.path={model}", f"output_dir={output}"),
        *(f"{group}.train_files=[{train}]", f"{group}.eval_files=[{held_out}]", f"{group}.eval_every=10"),
        *("megatron.expert_model_parallel_size=1", "megatron.lr=3e-3", "megatron.lr_decay_style=constant"),
        "tracking.loggers=[jsonl]",
        *overrides,
    ]
    assert main(arguments) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_fine_tuning_stops_where_enough_replies_are_right(given, tmp_path):
    steps = run("sft", tmp_path, given, "sft.steps=100", "sft.sequences_per_step=64", "sft.stop_at_exact_match=0.8")
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len(steps) < 100
    assert steps[-1]["sft/loss"] < 0.5 * steps[0]["sft/loss"]
    measured = {line["step"]: line["sft/exact_match"] for line in steps if "sft/exact_match" in line}
    assert list(measured) == list(range(10, len(steps) + 1, 10))
    assert [step for step, share in measured.items() if share >= 0.8] == [len(steps)]
    AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")


# Two data-parallel ranks, and micro-batches of a few pairs.
def test_dpo_prefers_the_chosen_replies_to_held_out_prompts(given, tmp_path):
    steps = run(
        "dpo",
        tmp_path,
        given,
        *("preference.steps=40", "preference.pairs_per_step=64", "loop.max_tokens_per_micro_batch=512"),
    )
    # Before the first step the policy is its reference.
    assert steps[0]["preference/accuracy"] == 0.5
    assert steps[0]["preference/margin"] == pytest.approx(0, abs=1e-3)
    assert steps[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["preference/eval_accuracy"] > 0.8
    assert steps[-1]["preference/eval_loss"] < 0.5
    assert steps[-1]["preference/eval_margin"] > 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
