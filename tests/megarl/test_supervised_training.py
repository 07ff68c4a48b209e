"""Training on examples, as commands: each learns what it is for, on held-out data, and leaves a model that loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from echo_task import CONVERSATIONS, EchoFiles, write_echo
from equal_runs import without_timings
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megarl.cli.main import main
from megarl.cluster.ray.runtime import ray_cluster
from megarl.data import load_conversations, load_pairs
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import ClusterConfig, PreferenceConfig

FINE_TUNING = ("sft.steps=100", "sft.eval_every=2", "sft.stop_at_exact_match=0.1")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with ray_cluster(ClusterConfig()):
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny model, and files of the task."""
    folder = tmp_path_factory.mktemp("given")
    return write_tiny_model("qwen3", folder / "model", fields={"num_hidden_layers": 2}), write_echo(folder / "data")


@pytest.fixture(scope="module")
def fine_tuned(given, tmp_path_factory):
    """The folder of a run that ended when a part of the replies was right, and its metrics."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    return folder, run("sft", folder, *given, *FINE_TUNING)


def run(command: str, output: Path, model: Path, files: EchoFiles, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step of a run of `command` on the task."""
    group = "sft" if command == "sft" else "preference"
    conversations = command in ("sft", "spin")
    train, held_out = files[:2] if conversations else files[2:]
    arguments = [
        *(command, "--config-name", f"quickstart_{command.replace('-', '_')}"),
        *(f"model.path={model}", f"output_dir={output}"),
        *(f"{group}.train_files=[{train}]", f"{group}.eval_files=[{held_out}]"),
        *([f"{group}.messages_column={CONVERSATIONS}"] if conversations else []),
        *("megatron.expert_model_parallel_size=1", "megatron.lr=3e-3", "megatron.lr_decay_style=constant"),
        *("sft.sequences_per_step=64", "preference.pairs_per_step=64", "preference.eval_every=10"),
        *("tracking.loggers=[jsonl]", "checkpoint.every=4", "checkpoint.keep_last=100"),
        *overrides,
    ]
    assert main(arguments) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def check_that_it_resumes(command: str, folder: Path, step: int, tmp_path: Path, *rest) -> None:
    """A run that was killed some time after the checkpoint of a step ends up as the one that was not."""
    output = tmp_path / "resumed"
    checkpoint = f"checkpoints/iter_{step:07d}"
    shutil.copytree(folder / checkpoint, output / checkpoint)
    before = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (output / "metrics.jsonl").write_text("".join(before[: step + 1]) + '{"step": ')
    again = run(command, output, *rest)
    assert list(map(without_timings, again)) == [without_timings(json.loads(line)) for line in before]
    for name in ("model.safetensors", "config.json"):
        assert (output / "huggingface" / name).read_bytes() == (folder / "huggingface" / name).read_bytes()


def series(steps: list[dict[str, float]], name: str) -> dict[int, float]:
    """The values of a metric by step."""
    return {int(line["step"]): line[name] for line in steps if name in line}


@pytest.mark.long
def test_fine_tuning_stops_where_enough_replies_are_right(fine_tuned, given, tmp_path, capfd):
    folder, steps = fine_tuned
    assert list(series(steps, "sft/loss")) == list(range(1, len(steps) + 1))
    assert len(steps) < 100
    assert steps[-1]["sft/loss"] < 0.5 * steps[0]["sft/loss"]
    measured = series(steps, "sft/exact_match")
    assert list(measured) == list(range(2, len(steps) + 1, 2))
    assert [step for step, share in measured.items() if share >= 0.1] == [len(steps)]
    assert_losses_are_those_of_transformers(folder / "huggingface", given[1].eval, steps[-1])
    last = len(steps)
    check_that_it_resumes("sft", folder, last - 1 - (last - 1) % 4, tmp_path, *given, *FINE_TUNING)
    capfd.readouterr()
    assert run("sft", folder, *given, *FINE_TUNING) == steps
    said = capfd.readouterr()
    assert said.out.startswith(f"converged after {last} steps")
    assert "starting the trainer" not in said.err


def assert_losses_are_those_of_transformers(folder: Path, file: Path, last: dict[str, float]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses, right = [], []
    for token_ids, mask in load_conversations([file], tokenizer, CONVERSATIONS, 100):
        tokens, said = torch.tensor(token_ids), torch.tensor(list(mask[1:])).bool()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1][said]
        losses += torch.nn.functional.cross_entropy(logits, tokens[1:][said], reduction="none").tolist()
        right += (logits.argmax(-1) == tokens[1:][said]).tolist()
    assert last["sft/eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert last["sft/eval_token_accuracy"] == pytest.approx(sum(right) / len(right))


# Two data-parallel ranks, and micro-batches of a few pairs.
@pytest.mark.long
def test_dpo_prefers_the_chosen_replies_to_held_out_prompts(given, tmp_path):
    settings = ("preference.steps=12", "preference.eval_every=6", "loop.max_tokens_per_micro_batch=512")
    steps = run("dpo", tmp_path, *given, *settings)
    # Before the first step the policy is its reference.
    assert steps[0]["preference/accuracy"] == 0.5
    assert steps[0]["preference/margin"] == pytest.approx(0, abs=1e-3)
    assert steps[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["preference/eval_accuracy"] > 0.8
    assert steps[-1]["preference/eval_loss"] < 0.5
    assert steps[-1]["preference/eval_margin"] > 0.5
    AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    check_that_it_resumes("dpo", tmp_path, 8, tmp_path, *given, *settings)


@pytest.mark.long
def test_the_work_of_the_first_step_is_its_own(given, tmp_path):
    steps = run("dpo", tmp_path, *given, "preference.steps=3", "preference.pairs_per_step=4", "checkpoint.every=0")
    first, second, _ = (
        line["throughput/trainer_tflops"] * (line["seconds/reference"] + line["seconds/update"]) for line in steps
    )
    # The reference's log-probs of held-out pairs are computed before.
    assert first == pytest.approx(second, rel=0.5)


@pytest.mark.long
def test_a_reward_model_ranks_held_out_replies_and_is_a_classifier(given, tmp_path):
    model, files = given
    settings = ("preference.steps=20", "cluster.trainer_ranks=1")
    steps = run("reward-model", tmp_path, model, files, *settings)
    # The head begins at 0.
    assert steps[0]["preference/accuracy"] == 0.5
    assert steps[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["preference/eval_accuracy"] > 0.8
    assert steps[-1]["preference/eval_loss"] < 0.5
    assert_scores_are_those_of_transformers(tmp_path / "huggingface", files.pairs_eval, steps[-1])
    check_that_it_resumes("reward-model", tmp_path, 16, tmp_path, model, files, *settings)


def assert_scores_are_those_of_transformers(folder: Path, pairs_file: Path, last: dict[str, float]) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pairs = load_pairs([pairs_file], AutoTokenizer.from_pretrained(folder), PreferenceConfig(), 100)
    with torch.no_grad():
        margins = [
            float(classifier(torch.tensor([pair.chosen.token_ids])).logits)
            - float(classifier(torch.tensor([pair.rejected.token_ids])).logits)
            for pair in pairs
        ]
    assert last["preference/eval_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert last["preference/eval_accuracy"] == sum(margin > 0 for margin in margins) / len(margins)


@pytest.mark.long
def test_self_play_brings_the_policy_nearer_to_the_data(given, fine_tuned, tmp_path):
    folder, before = fine_tuned
    settings = (
        *("preference.steps=15", "preference.steps_per_generation=5", "preference.eval_every=5"),
        *("preference.beta=0.1", "megatron.lr=1e-3"),
    )
    steps = run("spin", tmp_path, folder / "huggingface", given[1], *settings)
    assert list(series(steps, "preference/loss")) == list(range(1, 16))
    # At the beginning of an iteration the policy is its own opponent.
    for step in (1, 6, 11):
        assert steps[step - 1]["preference/accuracy"] == 0.5
        assert steps[step - 1]["preference/margin"] == pytest.approx(0, abs=1e-3)
    equal, exact = series(steps, "spin/equal"), series(steps, "spin/exact_match")
    assert list(equal) == list(series(steps, "refit/bytes")) == [1, 6, 11]
    assert equal[11] > 2 * equal[1]
    assert exact[15] > before[-1]["sft/exact_match"] + 0.1
    AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    # In the middle of an iteration, so that a part of what the opponent said is still to be learned from.
    check_that_it_resumes("spin", tmp_path, 12, tmp_path, folder / "huggingface", given[1], *settings)
