"""Predictions of `megarl plan` for refits of 671B and 1T parameters, and the time and memory of planning.

Each case is a command as a user would give it. Also measures how long a rank takes to derive its own part of the plan.
"""

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from machine import describe
from rich import box
from rich.console import Console
from rich.table import Table

from converters.plan import Plan
from megarl.cli import plan_recipe
from megarl.cli.main import build_parser
from megarl.cli.plan import planned_refit
from megarl.planning.refit import PlannedRefit

_DEEPSEEK = (
    "--model deepseek_v3 --gpus 512 --tp 4 --pp 16 --ep 32 --etp 1"
    " --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
)
# On H100s its trainer would not fit.
_KIMI = (
    "--model kimi_k2 --gpus 256 --tp 8 --pp 8 --ep 32 --etp 1 --decoder-last-pipeline-num-layers 5"
    " --device H200 --memory-gbyte 3350"
)
CASES = {
    "671B, TP32 bf16 x 8": f"{_DEEPSEEK} --engine-tp 32 --replicas 8",
    "671B, EP32 + DP attention FP8 x 8": f"{_DEEPSEEK} --engine-ep 32 --engine-dtype fp8 --replicas 8",
    "671B, TP16 FP8 x 16": f"{_DEEPSEEK} --engine-tp 16 --engine-dtype fp8 --replicas 16",
    "1T, 256 -> EP32 + DP attention FP8 x 4": f"{_KIMI} --engine-ep 32 --engine-dtype fp8 --replicas 4",
}
_RATIO_COLUMNS = ("case", "bound, s", "predicted, s", "x bound", "simulated, s", "x bound", "binding port")
_BYTE_COLUMNS = ("case", "GB into a GPU", "GB through its NIC", "GB over its NVLink", "GB out of a trainer's NIC")
_COST_COLUMNS = ("case", "command, s", "peak memory, MB", "own part, source, s", "own part, destination, s", "messages")
_PEER_COLUMNS = ("case", "of a source", "of a destination")
_PORTS = {
    "nic_out": "NIC out of a source",
    "nic_in": "NIC into a destination",
    "nvlink_in": "NVLink",
    "nvlink_out": "NVLink",
}
_NOTES = """\
- The lower bound is the largest of the bounds that `converters/cost/ports.py` writes out, with its assumptions: here
  the NICs of a node, through which everything that its GPUs need must come once. 400 Gbit/s and 450 GB/s of NVLink for
  each GPU and direction, 8 GPUs in a node.
- Predicted is the time of the busiest port. Simulated is a replay of every message: at most 512 MB, one at a time
  through each port at its full rate, two buckets for each rank, packing and unpacking at 3,350 GB/s of memory, with
  no time for a message's latency, for switches or for the engines' pause. Every byte that is needed is moved once.
- "x bound" compares with what no plan can beat, not with a measurement: none of this was run on a cluster.
- Trainer of the 671B: 512 GPUs, TP4 PP16 EP32 ETP1, 3 layers on the first stage and 2 on the last. Trainer of the 1T:
  256 GPUs, TP8 PP8 EP32 ETP1, 5 layers on the last.
- The command is timed as a whole, with the start of Python; memory is its largest resident size. "Own part" is
  `transfers_from` of a source rank and `destination_part` of a destination rank, each of a new plan: the slowest of
  three ranks.
"""


@dataclass(frozen=True)
class Result:
    """Output and cost of the command for a case."""

    name: str
    facts: Mapping[str, Any]
    seconds: float
    peak_bytes: int
    from_seconds: float
    into_seconds: float


def main() -> None:
    """Run the cases; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args()
    load = describe(Path(tempfile.gettempdir()))
    results = [_run(name, words) for name, words in CASES.items()]
    text = page(results, load)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


def _run(name: str, words: str) -> Result:
    print(f"{name} ...", file=sys.stderr)
    command = [sys.executable, "-m", "megarl.cli.main", "plan", *shlex.split(words), "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}")
    return Result(name, json.loads(said.splitlines()[-1]), seconds, usage.ru_maxrss * 1024, *_own_parts(words))


def refit_of(words: str) -> PlannedRefit:
    """Return the refit that `megarl plan` plans when given these words."""
    options, overrides = build_parser().parse_known_args(["plan", *shlex.split(words)])
    options.overrides = overrides
    plan_recipe.complete(options)
    return planned_refit(options)


def _own_parts(words: str) -> tuple[float, float]:
    """Maximum seconds that a source and a destination rank take for their own part, of three ranks each."""
    refit = refit_of(words)
    source, destination = refit.layouts()
    topology = refit.cluster.topology(source.ranks, refit.destinations, colocated=refit.colocated)
    slowest = [0.0, 0.0]
    for number, (ranks, part) in enumerate(
        ((source.ranks, Plan.transfers_from), (refit.destinations, Plan.destination_part))
    ):
        for rank in (0, ranks // 2, ranks - 1):
            plan = Plan(source, destination, refit.replicas, topology, node_once=refit.node_once)
            start = time.perf_counter()
            part(plan, rank)
            slowest[number] = max(slowest[number], time.perf_counter() - start)
    return slowest[0], slowest[1]


def page(results: list[Result], machine: str) -> str:
    """The page in Markdown."""
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    print("# Refits of 671B and 1T parameters, planned\n", file=out)
    print(f"{date.today().isoformat()}, {machine}.\n", file=out)
    print("    .venv/bin/python benchmarks/plan.py\n", file=out)
    for title, columns, rows in (
        ("Seconds", _RATIO_COLUMNS, _ratios(results)),
        ("Bytes, of the busiest", _BYTE_COLUMNS, _bytes(results)),
        ("Peers, at most", _PEER_COLUMNS, _peers(results)),
        ("What it costs to know", _COST_COLUMNS, _costs(results)),
    ):
        print(f"## {title}", file=out)
        table = Table(*columns, box=box.MARKDOWN)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    print("## The commands\n", file=out)
    for name, words in CASES.items():
        print(f"{name}:\n\n    megarl plan {words}\n", file=out)
    print(f"## What the figures are\n\n{_NOTES}", file=out, end="")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _ratios(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        facts = result.facts
        yield (
            result.name,
            f"{facts['lower_bound_seconds']:.3f}",
            f"{facts['transfer_seconds']:.3f}",
            f"{facts['transfer_over_lower_bound']:.3f}",
            f"{facts['simulated_seconds']:.3f}",
            f"{facts['simulated_over_lower_bound']:.3f}",
            _PORTS[facts["binding_port"]["kind"]],
        )


def _bytes(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        loads = result.facts["loads"]
        names = ("into a GPU", "NIC in", "NVLink in", "NIC out")
        yield (result.name, *(f"{loads[name]['most'] / 1e9:.2f}" for name in names))


def _peers(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        peers = result.facts["peers"]
        yield result.name, str(peers["trainer"]), str(peers["engine"])


def _costs(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        yield (
            result.name,
            f"{result.seconds:.1f}",
            f"{result.peak_bytes / 1e6:,.0f}",
            f"{result.from_seconds:.2f}",
            f"{result.into_seconds:.2f}",
            f"{result.facts['messages']:,}",
        )


if __name__ == "__main__":
    main()
