"""Cost of a quickstart step on a CPU, compared with a step of TRL's GRPOTrainer on the same job.

Both start from the same model, take the same prompts with 8 responses each, and make one update of the same loss in
fp32: a tiny model after its warm-up with 64 prompts per step, or a pretrained one of 135 million parameters with 4
prompts, and responses of similar or of varied lengths. TRL samples with HuggingFace's generate, as its vLLM mode needs
a GPU. The programs take turns, each run is a separate process tree on the same cores, and measurement begins after the
warm-up steps.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

from machine import at_least_one, cpu_name
from observation import Observation, Window, observe
from rich.console import Console
from step_table import ratios, step_table
from workload import MEGARL, MODELS, Workload, environment, prepare

from megarl.tracking.versions import versions

_NO_PEER = "TRL is not installed, so megarl stands alone: `make benchmark-setup` installs it, then run this again."


@dataclass(frozen=True)
class Program:
    """A compared program; `command` takes `megarl train`'s arguments."""

    name: str
    command: tuple[str, ...]
    threads: int | None


def programs(trl_threads: Sequence[int]) -> list[Program]:
    """megarl, and TRL once per number of threads, if it is installed."""
    found = [Program("megarl", (*MEGARL, "train"), threads=None)]
    if util.find_spec("trl") is not None:
        command = (sys.executable, str(Path(__file__).with_name("trl_grpo.py")))
        found += [Program(f"TRL, {threads} thread{'s' * (threads > 1)}", command, threads) for threads in trl_threads]
    return found


def measure(
    compared: Sequence[Program], workload: Workload, window: Window, repeats: int, folder: Path, console: Console
) -> dict[str, list[Observation]]:
    """Run all programs in turn, `repeats` times: A B A B ..."""
    observations: dict[str, list[Observation]] = {program.name: [] for program in compared}
    for repeat in range(repeats):
        for number, program in enumerate(compared):
            output_dir = folder / f"run_{repeat}_{number}"
            arguments = workload.of_run(output_dir, window.run_steps)
            seen = observe([*program.command, *arguments], environment(program.threads), output_dir, window)
            observations[program.name].append(seen)
            console.print(
                f"run {repeat + 1}/{repeats}  {program.name}: {seen.cpu_seconds_per_step:.3f} CPU s and "
                f"{seen.wall_seconds_per_step:.3f} s a step",
                highlight=False,
            )
    return observations


def main() -> None:
    """Measure and print; see `--help`."""
    options = _parse_options()
    console = Console(width=160 if not sys.stdout.isatty() else None)
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)
    window = Window(options.warm_up_steps, options.steps)
    compared = programs(options.trl_threads)
    console.print(f"{options.model}: {window.steps} steps a run, {options.repeats} runs each, on {len(cores)} cores")
    console.print(f"{cpu_name()}; {', '.join(f'{name} {version}' for name, version in _versions().items())}")
    with tempfile.TemporaryDirectory(prefix="megarl-benchmark-") as folder:
        workload = prepare(options.model, Path(folder))
        observations = measure(compared, workload, window, options.repeats, Path(folder), console)
    console.print(step_table(observations))
    for sentence in ratios(observations):
        console.print(sentence, highlight=False)
    if len(compared) == 1:
        console.print(_NO_PEER)
    if options.json is not None:
        _write_json(options, len(cores), observations)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=MODELS, default="qwen3_moe", help="the job: its model, and of the real one the lengths"
    )
    parser.add_argument("--steps", type=at_least_one, default=20, help="steps to measure in each run")
    parser.add_argument("--warm-up-steps", type=at_least_one, default=3, help="steps before those")
    parser.add_argument("--repeats", type=at_least_one, default=3, help="runs of each program")
    parser.add_argument("--cores", type=at_least_one, default=2, help="CPU cores that a run may use")
    parser.add_argument(
        "--trl-threads",
        type=at_least_one,
        nargs="+",
        default=[1],
        metavar="N",
        help="OMP_NUM_THREADS of TRL; several compare",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run's numbers to FILE")
    return parser.parse_args()


def _versions() -> dict[str, str]:
    peers = [name for name in ("trl", "accelerate") if util.find_spec(name) is not None]
    return {**versions(), **{name: metadata.version(name) for name in peers}}


def _write_json(options: argparse.Namespace, cores: int, observations: Mapping[str, Sequence[Observation]]) -> None:
    result = {
        "model": options.model,
        "steps": options.steps,
        "cores": cores,
        "cpu": cpu_name(),
        "versions": _versions(),
        "runs": {name: [asdict(run) for run in runs] for name, runs in observations.items()},
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
