"""The main job on every architecture: what is sampled is what is trained on, and the engine has the trained weights."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from converters.boxes import Box
from converters.examine import compare
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.hf_to_megatron import HUGGINGFACE, convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from megarl.config.compose import compose
from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.run.job import open_job
from megarl.run.opening import RunSetup
from megarl.tracking.clock import Clock
from megarl.train import train_step

pytestmark = pytest.mark.usefixtures("shared_cluster")

STEPS = 3
LENGTH = 12
# Each model on another layout, so that every kind of cut is put together by a refit.
LAYOUTS = {
    "qwen3_moe": "expert_model_parallel_size",
    "qwen3": "tensor_model_parallel_size",
    "deepseek_v3": "pipeline_model_parallel_size",
}

FURTHER = ("qwen3", "deepseek_v3")

# The one whose training begins with a converted checkpoint.
CONVERTED = "qwen3_moe"
# The one of which a timeline is written: pipeline stages send each other activations, and engines have processes of
# their own.
PROFILED = "deepseek_v3"
# The one with a layer for multi-token prediction, which learns beside the policy; the engine leaves it out.
PREDICTING = "deepseek_v3"

# The one that trains an adapter: engines get the weights with it merged into them.
ADAPTED = "qwen3"


@pytest.mark.parametrize("model", ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.long) for each in FURTHER)])
def test_engine_and_trainer_are_the_same_model_at_every_step(model, tmp_path):
    config = make_config(model, tmp_path)
    source = Path(config.model.path)
    if model == CONVERTED:
        begin_with_a_converted_checkpoint(config, tmp_path / "converted")
    with open_job(RunSetup.read(config, "train")) as job:
        if model == CONVERTED:
            check_that_training_begins_with(source, job, tmp_path / "run" / EXPORT)
        job.refit(0)
        clock, hold, outdated = Clock(), job.rollouts.drain, []
        job.rollouts.drain = lambda: (outdated.append(job.refit._is_outdated), hold())
        for step in range(STEPS):
            with job.timeline.record(step + 1):
                metrics = train_step(job, clock)
            assert metrics["log_prob_difference/max"] < 1e-4
            assert metrics["policy/gradient_norm"] > 0
            assert metrics["refit/direct"] == 1
            assert ("mtp/loss/layer_1" in metrics) == (model == PREDICTING)
            # All of a step's tokens are of the version it began with.
            assert metrics["staleness/mean"] == 0
            assert job.state.step == step + 1
            # Nobody could be given weights of the step as those before it.
            assert (outdated.pop(), job.refit._is_outdated) == (True, False)
            if model == ADAPTED:
                # The reference is the model without its adapter, which begins as an update of 0.
                kl = metrics["policy/kl_to_reference"]
                assert kl > 1e-4 if step else abs(kl) < 1e-6
        if model == PROFILED:
            check_the_timeline(tmp_path / "run/profiles")
        job.export()
        prompts = job.data.eval_prompts[:4]
        # The model's own end tokens are not in the way of twelve tokens: the engine stops where transformers would.
        greedy = SamplingParameters(temperature=0.0, max_tokens=LENGTH)
        answers = job.engines.generate([Request(list(prompt.token_ids), greedy) for prompt in prompts])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / EXPORT, dtype=torch.float32)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert answer.token_ids.tolist() == greedy_tokens(reference, prompt.token_ids)
        assert set(answer.versions) == {STEPS}
    if model == PREDICTING:
        before, after = (HuggingFaceCheckpoint(each) for each in (source, tmp_path / "run" / EXPORT))
        name = "model.layers.4.eh_proj.weight"
        change = after.read(name, Box.whole(after.shapes[name])) - before.read(name, Box.whole(before.shapes[name]))
        assert 0.001 < float(change.abs().max()) < 0.1


def check_the_timeline(folder):
    """It has what all processes did in the second step, and when."""
    (path,) = folder.iterdir()
    assert path.name == "step_2.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    done = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            done[names[event["pid"]]].add(re.sub(r"\d+", "N", event["name"]))
    expected = ["rollout", "log_probs", "advantage", "update", "refit"]
    stages = sorted((event for event in events if event["name"] in expected), key=lambda event: event["ts"])
    assert list(dict.fromkeys(event["name"] for event in stages)) == expected
    update, refit = (next(each for each in stages if each["name"] == name) for name in ("update", "refit"))
    of_trainer = {"N micro-batches", "forward pass of N tokens", "send a message"}
    assert of_trainer <= done["trainer_0"] & done["trainer_1"]
    assert "engine step" in done["engine_0"]
    assert "write a message" in done["engine_0 worker 0"] & done["engine_0 worker 1"]
    assert done["reward workers"] == {"score"}
    # One clock for all.
    for event in events:
        if event["name"] in ("send a message", "write a message"):
            assert refit["ts"] <= event["ts"] <= refit["ts"] + refit["dur"]
        if event["name"].endswith("micro-batches"):
            assert update["ts"] <= event["ts"] <= update["ts"] + update["dur"]
    collectives = [event for event in events if event["name"].startswith("gloo:")]
    assert any(event["args"].get("bytes", 0) > 1000 for event in collectives)


def begin_with_a_converted_checkpoint(config, converted):
    """Convert to another layout than training has, and leave no weights in model.path."""
    layout = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
    convert_checkpoint(
        *(Path(config.model.path), converted, layout),
        dtype="keep",
        vocabulary_multiple=128,
        workers=1,
        progress=lambda done, total: None,
    )
    config.model.path, config.model.megatron_checkpoint = str(converted / HUGGINGFACE), str(converted)


def check_that_training_begins_with(source, job, exported):
    job.export()
    assert compare(source, exported, hf_config_folder=None, workers=1, progress=lambda done, total: None).is_same


def make_config(model: str, folder):
    fields = {"num_hidden_layers": 4} if LAYOUTS[model].startswith("pipeline") else {}
    fields |= {"num_nextn_predict_layers": 1} if model == PREDICTING else {}
    path = write_tiny_model(model, folder / "model", fields=fields)
    files = write_arithmetic(folder / "data", held_out=16)
    return compose(
        "quickstart",
        [
            f"output_dir={folder / 'run'}",
            f"model.path={path}",
            f"data.train_files=[{files.train}]",
            f"data.eval_files=[{files.eval}]",
            "megatron.expert_model_parallel_size=1",
            f"megatron.{LAYOUTS[model]}=2",
            # Large steps: a refit that did not happen would show.
            "megatron.lr=1e-2",
            "loop.prompts_per_step=8",
            "loop.samples_per_prompt=4",
            # A reward with some variance, though the model knows nothing yet.
            f"reward.function={Path(__file__).with_name('digits.py')}:count_digits",
            "refit.bucket_bytes=600000",
            "tracking.loggers=[]",
            f"tracking.profile={2 if model == PROFILED else 'null'}",
            *(("rollout.engine_args.tensor_parallel_size=2",) if model == PROFILED else ()),
            *(("lora.rank=4", "algorithm.kl_coefficient=0.01") if model == ADAPTED else ()),
        ],
    )


def greedy_tokens(model: torch.nn.Module, prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + LENGTH:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == model.generation_config.eos_token_id:
                break
    return tokens[len(prompt) :]
