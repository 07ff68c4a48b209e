"""Measured speedup of sampling ahead: steps per second of whole runs, with one core each for engine and trainer.

Lengths come from a heavy-tailed table (`schedules_run.py`). Runs of the schedules take turns, each in new processes;
the first steps are not counted. All are compared with the first schedule that is given, S=0 by default. "Overlap alone"
is the duration of its step divided by the longer of its two sides, rollout or the rest: 2 if they are equal. A schedule
exceeds it if responses of several batches are sampled together, and falls short of it if the two sides slow each other
down. "In turns": one side waits while the other works, as on shared GPUs.

A larger model on GPUs (settings are those of any run):

    .venv/bin/python benchmarks/schedules_real.py --model dense_1b --dtype bf16 --schedules "S=0" "S=1" "S=1, keep"
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from machine import at_least_one, describe
from models_by_size import LARGE, TINY, write_model
from observation import Window, observe
from schedules_run import tokens_of
from transformers.utils import logging
from workload import REWARD, environment

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.tracking import read_history

ROOT = Path(__file__).resolve().parent.parent
IN_TURNS = "cluster.pools={all: {roles: [trainer, engine], nodes: 1, shared: true}}"
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "S=0": (),
    "S=1, wait": ("schedule.max_staleness=1", "schedule.in_flight=wait"),
    "S=1": ("schedule.max_staleness=1", "schedule.in_flight=recompute"),
    "S=1, keep": ("schedule.max_staleness=1", "schedule.in_flight=keep"),
    "S=2": ("schedule.max_staleness=2", "schedule.in_flight=recompute"),
    "S=0, in turns": (IN_TURNS,),
    "S=1, in turns": (IN_TURNS, "schedule.max_staleness=1", "schedule.in_flight=recompute"),
    "S=2, in turns": (IN_TURNS, "schedule.max_staleness=2", "schedule.in_flight=recompute"),
}
LONGEST = 288


def workload(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command line of a run, without its schedule, length and folder."""
    logging.disable_progress_bar()
    layers = {"num_hidden_layers": 4} if arguments.model in TINY else {}
    model = endless(write_model(arguments.model, folder / "model", vocab_size=63, **layers))
    files = write_arithmetic(folder / "data", held_out=16)
    return [
        *(sys.executable, str(Path(__file__).with_name("schedules_run.py")), "train", "--config-name", "quickstart"),
        *(f"model.path={model}", f"data.train_files=[{files.train}]", "megatron.expert_model_parallel_size=1"),
        *("cluster.trainer_ranks=1", "cluster.engine_threads=1", f"rollout.engine={arguments.engine}"),
        *(f"rollout.max_response_tokens={LONGEST}", "rollout.engine_args.max_model_len=320"),
        *(f"loop.prompts_per_step={arguments.prompts}", "loop.samples_per_prompt=4", "checkpoint.every=0"),
        *("loop.max_tokens_per_micro_batch=1024", "algorithm.train_on_truncated_responses=true"),
        "tracking.loggers=[jsonl]",
        f"reward.function={REWARD}",
        *([f"model.dtype={arguments.dtype}"] if arguments.dtype else []),
        *arguments.settings,
    ]


def endless(model: Path) -> Path:
    """Give the model in a folder an end token outside its vocabulary; return the folder."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    last, number = max(vocabulary.items(), key=lambda each: each[1])
    ends = {"config.json": number, "generation_config.json": number, "tokenizer_config.json": last}
    for name, end in ends.items():
        key = "eos_token" if end == last else "eos_token_id"
        held = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**held, key: end}))
    return model


def mean_of(name: str, output: Path, window: Window) -> float:
    """The mean of a metric over the steps that have it; 0 if none has."""
    lines = read_history(output)[window.warm_up : window.warm_up + window.steps]
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / max(1, len(values))


def mean_seconds(output: Path, window: Window) -> dict[str, float]:
    """Mean seconds of each stage per step, and not the median, as a few steps have many times longer responses."""
    lines = read_history(output)[window.warm_up : window.warm_up + window.steps]
    stages = [name for name in lines[0] if name.startswith("seconds/")]
    return {name.removeprefix("seconds/"): sum(line.get(name, 0.0) for line in lines) / len(lines) for name in stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=16, help="that are counted")
    parser.add_argument("--prompts", type=at_least_one, default=24, help="of a step; they set how long an update takes")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--model", choices=(*TINY, *LARGE), default="qwen3")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights; else that of the quickstart")
    parser.add_argument("--settings", nargs="+", default=[], metavar="KEY=VALUE", help="of all runs")
    arguments = parser.parse_args()
    window = Window(4, arguments.steps)
    drawn = sorted(tokens_of(ordinal, LONGEST) for ordinal in range(arguments.prompts * arguments.steps))
    middle, tail = drawn[len(drawn) // 2], drawn[-len(drawn) // 20]
    print(f"{describe(ROOT)}; {middle} tokens at the median, {tail} at the 95th percentile, {drawn[-1]} at most\n")
    print(
        f"| round | schedule | s a step | CPU s | steps/s, of {arguments.schedules[0]} | overlap alone | rollout s"
        " | update s | refit s | prefilled again | gap of kept keys and values, nats |"
    )
    print(f"|---:|---|{'---:|' * 9}", flush=True)
    gains: dict[str, list[float]] = {name: [] for name in arguments.schedules}
    with tempfile.TemporaryDirectory() as scratch:
        command = workload(Path(scratch), arguments)
        for number in range(arguments.rounds):
            first = overlapped = 0.0
            for name in arguments.schedules:
                output = Path(scratch) / f"{number}_{len(gains[name])}_{arguments.schedules.index(name)}"
                run = [*command, *SCHEDULES[name], f"loop.steps={window.run_steps}", f"output_dir={output}"]
                seen = observe(run, environment(threads=1), output, window)
                stages = mean_seconds(output, window)
                if not first:
                    first = seen.wall_seconds_per_step
                    overlapped = first / max(stages["rollout"], first - stages["rollout"])
                gains[name].append(first / seen.wall_seconds_per_step)
                measured = seen.wall_seconds_per_step, seen.cpu_seconds_per_step, gains[name][-1], overlapped
                seconds = (*measured, *(stages[stage] for stage in ("rollout", "update", "refit")))
                again = mean_of("refit/tokens_recomputed", output, window)
                gap = mean_of("staleness/kept_kv_gap", output, window)
                figures = f"{' | '.join(f'{each:.2f}' for each in seconds)} | {again:.0f} | {gap:.4f}"
                print(f"| {number} | {name} | {figures} |", flush=True)
    medians = ", ".join(f"{name} {median(each):.2f}" for name, each in gains.items())
    print(f"\nMedians of {arguments.rounds} rounds: {medians}", flush=True)


if __name__ == "__main__":
    main()
