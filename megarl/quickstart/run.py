"""The quickstart: from nothing to a trained, exported and verified model, on a CPU or on GPUs."""

import argparse
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from converters.errors import UserError, names_as_given
from converters.number_formats import AS_TRAINED
from megarl.cluster.ray.runtime import ray_cluster
from megarl.config.assignment import override
from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.evaluate import fresh_engines
from megarl.output.lock import LOCK, sole_writer
from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import ArithmeticFiles
from megarl.quickstart.gaps import log_prob_gaps
from megarl.quickstart.gpus import ACCURACY_TOLERANCE, BF16, overrides_for
from megarl.quickstart.models import MODELS, SCHEDULES, UNQUANTISED, QuickstartModel
from megarl.quickstart.outcome import Outcome
from megarl.quickstart.questions import QuestionFiles
from megarl.rollout import engine_kind
from megarl.rollout.number_format import held_format
from megarl.run.checkpoints import checkpoints_folder
from megarl.run.resumption import run_with_restarts
from megarl.schema import MegarlConfig, RolloutConfig
from megarl.sft import sft
from megarl.tracking import read_history
from megarl.tracking.jsonl import FILE_NAME
from megarl.tracking.report import report_table, write_report
from megarl.train import train
from megatron_ext import device
from megatron_ext.checkpoint.checkpoint_folder import complete_iterations, iteration_folder

_MARKER = ".megarl-quickstart"
# Keeps paths on one line, also if the output is not a terminal.
_TABLE_WIDTH = 120


def main(options: argparse.Namespace) -> int:
    """Run the quickstart; return 0, or 1 if it has not learned or its export does not match the trained model."""
    if options.weights != UNQUANTISED:
        with names_as_given({"rollout.weights": "--weights", "rollout.engine": "--engine"}):
            held_format(RolloutConfig(engine=options.engine or RolloutConfig.engine, weights=options.weights))
    # `make` passes it in quotes, and not every shell expands the ~ of OUTPUT=~/runs.
    output = Path(options.output_dir or f"runs/quickstart_{options.model}").expanduser().absolute()
    with names_as_given({"output_dir": "--output-dir"}), sole_writer(output):
        return _run(options, output)


def _run(options: argparse.Namespace, output: Path) -> int:
    _prepare(output)
    disable_progress_bar()
    console = Console()
    seconds: dict[str, float] = defaultdict(float)

    chosen = MODELS[options.model]
    with _phase(console, seconds, "model and data", chosen.about):
        folder = chosen.write(output / "model", options.weights)
        files = chosen.write_data(output / "data")
    warm_up = _warm_up_config(chosen, output, folder, files, options.weights)
    policy = folder if warm_up is None else output / "warm_up" / EXPORT
    job = _job_config(chosen, output, policy, files, options)
    with ray_cluster(job.cluster):
        if warm_up is not None:
            told = "supervised, until about a third of the held-out answers are right"
            with _phase(console, seconds, "warm-up", told):
                run_with_restarts(sft, warm_up)
        with _phase(console, seconds, "training", f"GRPO, {job.loop.steps} steps of {_step_size(job)}"):
            validate(job, "train")
            run_with_restarts(train, job)
        with (
            _phase(console, seconds, "check", f"a fresh {_engine(job)} engine loads the export"),
            fresh_engines(_check_config(job, output)) as fresh,
        ):
            confirmed = fresh.evaluate()["eval/accuracy"]
            sampled = {} if job.rollout.weights == AS_TRAINED else {job.rollout.weights: fresh.sample()}
        gaps = {}
        if sampled:
            with _phase(console, seconds, "gaps", f"one that holds it in {job.model.dtype}, and the trainer"):
                plain = _check_config(job, output)
                plain.rollout.weights = AS_TRAINED
                with fresh_engines(replace(plain, output_dir=str(output / "gaps"))) as fresh:
                    sampled[job.model.dtype] = fresh.sample()
                gaps = log_prob_gaps(replace(job, output_dir=str(output / "gaps")), output / EXPORT, sampled)
    bar = chosen.bar_in_format(options.weights) if options.steps is None else None
    return _report(console, job, output, confirmed, bar, gaps, seconds)


def _prepare(output: Path) -> None:
    """Remove an earlier quickstart from its folder; raise an error if the folder contains anything else."""
    earlier = [path for path in output.iterdir() if path.name != LOCK]
    if earlier and not (output / _MARKER).exists():
        raise UserError(f"{output} holds files that are not a quickstart's: remove it or give another --output-dir")
    for path in earlier:
        if path.name == _MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (output / _MARKER).touch()


def _warm_up_config(
    chosen: QuickstartModel, output: Path, model: Path, files: ArithmeticFiles | QuestionFiles, weights: str
) -> MegarlConfig | None:
    if chosen.warm_up is None:
        return None
    assert isinstance(files, ArithmeticFiles), "a warm-up learns from answers that are written out"
    warm_up = compose(
        "quickstart_sft",
        [
            *chosen.warm_up.overrides,
            *overrides_for(device.gpus()),
            *(BF16 if weights != AS_TRAINED else ()),
            override("output_dir", output / "warm_up"),
            override("model.path", model),
            override("sft.train_files", [str(files.sft_train)]),
            override("sft.eval_files", [str(files.sft_eval)]),
        ],
    )
    validate(warm_up, "sft")
    return warm_up


def _job_config(
    chosen: QuickstartModel,
    output: Path,
    model: Path,
    files: ArithmeticFiles | QuestionFiles,
    options: argparse.Namespace,
) -> MegarlConfig:
    engine = options.engine or RolloutConfig.engine
    job = compose(
        chosen.recipe,
        [
            *chosen.overrides,
            *overrides_for(device.gpus(), engine),
            *chosen.in_format(options.weights),
            *SCHEDULES[options.schedule],
            f"rollout.engine={engine}",
            override("output_dir", output),
            override("model.path", model),
            override("data.train_files", [str(files.train)]),
            override("data.eval_files", [str(files.eval)]),
            *([f"loop.steps={options.steps}"] if options.steps is not None else []),
        ],
    )
    job.rollout.engine_args = named_for(engine, job.rollout.engine_args)
    return job


def named_for(engine: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a recipe's engine arguments, which are named for the default engine, for `engine`."""
    usual, own = (engine_kind(name).context_argument for name in (RolloutConfig.engine, engine))
    return {own if name == usual else name: value for name, value in arguments.items()}


def _check_config(job: MegarlConfig, output: Path) -> MegarlConfig:
    overrides = [
        override("model.path", output / EXPORT),
        override("data.eval_files", job.data.eval_files),
        override("output_dir", output / "check"),
        f"rollout.max_response_tokens={job.rollout.max_response_tokens}",
        f"rollout.temperature={job.rollout.temperature}",
        f"reward.function={job.reward.function}",
    ]
    check = compose("eval", overrides)
    check.rollout.engine = job.rollout.engine
    check.rollout.engine_args = dict(job.rollout.engine_args)
    check.rollout.weights = job.rollout.weights
    check.cluster = job.cluster
    return check


def _report(
    console: Console,
    job: MegarlConfig,
    output: Path,
    confirmed: float,
    bar: float | None,
    gaps: Mapping[str, float],
    seconds: Mapping[str, float],
) -> int:
    history = read_history(output)
    accuracies = [line["eval/accuracy"] for line in history if "eval/accuracy" in line]
    is_exact = not device.gpus() and job.rollout.weights == AS_TRAINED
    outcome = Outcome(accuracies[-1], confirmed, 0 if is_exact else ACCURACY_TOLERANCE, bar)
    results: dict[str, Any] = {
        "first accuracy": accuracies[0],
        "last accuracy": accuracies[-1],
        f"accuracy of the export in a fresh {_engine(job)}": confirmed,
        _largest_difference(job): _largest(history, "log_prob_difference/max"),
        **{f"mean log-prob gap of the export, {held_in} - trainer": gap for held_in, gap in gaps.items()},
        "path of the weights into the engine": _refit_path(history),
        **{f"seconds: {phase}": value for phase, value in seconds.items()},
    }
    summary = {
        "accuracy_first": accuracies[0],
        "accuracy_last": accuracies[-1],
        "accuracy_export": confirmed,
        "export_confirmed": outcome.export_is_confirmed,
        "accuracy_bar": bar,
        "steps": job.loop.steps,
        "refit_path": _refit_path(history),
        **({"log_prob_gaps": dict(gaps)} if gaps else {}),
        "seconds_per_phase": dict(seconds),
        "seconds_per_stage": _stage_seconds(history),
    }
    written = write_report(output, history, summary)
    checkpoints = checkpoints_folder(job)
    paths: dict[str, Path] = {
        "metrics": output / FILE_NAME,
        "summary": written.summary,
        "curves": written.curves,
        "Megatron checkpoint": iteration_folder(checkpoints, complete_iterations(checkpoints)[-1]),
        "HuggingFace export": output / EXPORT,
    }
    console.print()
    shown = {name: Path(os.path.relpath(path)) for name, path in paths.items()}
    wide = Console(width=max(console.width, _TABLE_WIDTH))
    with wide.capture() as table:
        wide.print(report_table("megarl quickstart", results, shown))
    # rich pads each line with blanks to the width.
    print("\n".join(line.rstrip() for line in table.get().splitlines()), flush=True)
    console.print()
    console.print(outcome.sentence(_engine(job)), soft_wrap=True)
    return 0 if outcome.export_is_confirmed and outcome.has_learned else 1


def _largest_difference(job: MegarlConfig) -> str:
    # With staleness, the engine sampled with weights that the trainer has updated since.
    later = ", with its staleness" if job.schedule.max_staleness else ""
    return f"largest log-prob difference, engine - trainer{later}"


def _largest(history: list[dict[str, Any]], name: str) -> float | str:
    """The largest finite value of a metric; the file has null for values that are not finite."""
    return max((value for line in history if (value := line.get(name)) is not None), default="never finite")


def _engine(job: MegarlConfig) -> str:
    return engine_kind(job.rollout.engine).title


def _refit_path(history: list[dict[str, Any]]) -> str:
    paths = [line["refit/direct"] for line in history if "refit/direct" in line]
    direct = int(sum(paths))
    return f"direct in {direct} of {len(paths)} refits" if direct else "loader"


def _stage_seconds(history: list[dict[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for line in history:
        for name, value in line.items():
            if name.startswith("seconds/"):
                totals[name.removeprefix("seconds/")] += value
    return dict(totals)


def _step_size(job: MegarlConfig) -> str:
    return f"{job.loop.prompts_per_step} prompts x {job.loop.samples_per_prompt} samples"


@contextmanager
def _phase(console: Console, seconds: dict[str, float], name: str, what: str) -> Iterator[None]:
    console.print(f"[bold]{name}[/bold]: {what}", highlight=False)
    started = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - started
