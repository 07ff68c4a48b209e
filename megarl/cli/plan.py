"""Predict a refit from config.json alone: what it moves, through which ports, and how long it takes.

Counts the bytes of every rank, NIC and node for a trainer, its engines and a cluster, says how far from the lower bound
that is which no plan can beat, and replays every message over the ports. Needs no GPU and no weights.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.cli import outcome, plan_recipe
from megarl.cli.parallel_options import add_parallel_sizes, parallel_sizes
from megarl.planning.amounts import read_bytes, say_seconds

if TYPE_CHECKING:
    from megarl.planning.forecast import Forecast
    from megarl.planning.refit import PlannedRefit

EXAMPLES = """examples:
  megarl plan --model deepseek_v3 --gpus 512 --tp 4 --pp 16 --ep 32 --etp 1 \\
      --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 --engine-tp 32 --replicas 8
  megarl plan --model kimi_k2 --gpus 256 --tp 8 --pp 8 --ep 32 --etp 1 --decoder-last-pipeline-num-layers 5 \\
      --engine-ep 32 --engine-dtype fp8 --replicas 4 --plot plan.png
  megarl plan --config-name grpo_deepseek_v3 --model deepseek_v3 --engine-dtype fp8
  megarl plan --model Qwen3-30B-A3B --gpus 16 --tp 2 --ep 8 --etp 1 --engine-tp 4 --replicas 4 --colocated --json
"""
TAKES_OVERRIDES = True
_CLUSTER = (
    ("--gpus-per-node", "gpus_per_node", int, 8, "GPUs of a node"),
    ("--nic-gbit", "nic_gbit_per_s", float, 400.0, "network of one GPU, each way, in Gbit/s"),
    ("--nvlink-gbyte", "nvlink_gbyte_per_s", float, 450.0, "NVLink of one GPU, each way, in GB/s"),
    ("--memory-gbyte", "memory_gbyte_per_s", float, 3350.0, "memory of one GPU, in GB/s"),
    ("--nodes", "nodes", int, None, "nodes that there are (default: as many as it takes)"),
)
"""Option, field of `Cluster`, type, default, help."""
_PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", metavar="NAME", help="config.json, a folder with one, or a name in configs/models")
    trainer = parser.add_argument_group("trainer")
    trainer.add_argument("--gpus", type=int, metavar="N", help="ranks (default: as few as the sizes allow)")
    add_parallel_sizes(trainer)
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engine-tp", type=int, metavar="N", help="tensor-parallel size (1)")
    engines.add_argument(
        "--engine-ep",
        type=int,
        metavar="N",
        help="whole experts on each of N ranks, which are groups of --engine-tp with all of attention in each"
        " (default: experts are cut like attention)",
    )
    engines.add_argument(
        "--engine-dtype",
        metavar="FORMAT",
        help="of matrices: bf16, fp8, or another that rollout.weights has: int8_channel, mxfp8 (bf16)",
    )
    engines.add_argument("--replicas", type=int, metavar="N", help="engines (1)")
    engines.add_argument(
        "--engine-model", metavar="NAME", help="what the engines have loaded, if it is another file than --model"
    )
    cluster = parser.add_argument_group("cluster")
    for name, field, kind, default, text in _CLUSTER:
        cluster.add_argument(
            name,
            dest=field,
            type=kind,
            default=default,
            metavar="N",
            help=text + (f" ({default:g})" if default else ""),
        )
    cluster.add_argument("--colocated", action="store_true", help="engines are on the GPUs of the trainer")
    moving = parser.add_argument_group("moving")
    moving.add_argument("--bucket-bytes", metavar="SIZE", help="size of a bucket (512MB)")
    moving.add_argument("--buckets", type=int, default=2, metavar="N", help="buckets of each rank (%(default)s)")
    moving.add_argument(
        "--node-once",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="what several ranks of a node need enters it once and goes round over NVLink",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw who sends to whom, and the load of the ports")
    outcome.add_json(parser)
    plan_recipe.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Count, predict, replay; print it."""
    from converters.cost import formats, traffic
    from converters.plan import Plan
    from megarl.planning.forecast import Forecast

    start = time.perf_counter()
    _check_picture(options.plot)
    plan_recipe.complete(options)
    with outcome.streaming(), outcome.file_errors_in_a_sentence():
        refit = planned_refit(options)
        source, destination = refit.layouts()
        topology = refit.cluster.topology(source.ranks, refit.destinations, colocated=refit.colocated)
        plan = Plan(source, destination, refit.replicas, topology, node_once=refit.node_once)
        forecast = Forecast.of(refit, traffic(plan, formats(refit.architecture, number_format=refit.number_format)))
        if options.plot:
            from megarl.planning.picture import draw_forecast

            draw_forecast(forecast).savefig(options.plot)
    _print(forecast, options, time.perf_counter() - start)
    return 0


def planned_refit(options: argparse.Namespace) -> "PlannedRefit":
    """Read the refit to plan from the options. Raises UserError for a refit that is not possible."""
    from megarl.planning.cluster import Cluster
    from megarl.planning.refit import PlannedRefit, engine_sizes, read_model

    architecture = read_model(options.model)
    return PlannedRefit(
        architecture=architecture,
        engine_architecture=read_model(options.engine_model) if options.engine_model else architecture,
        trainer=parallel_sizes(options, options.gpus),
        engine=engine_sizes(options.engine_tp, options.engine_ep),
        replicas=options.replicas,
        engine_dtype=options.engine_dtype,
        cluster=Cluster(**{field: getattr(options, field) for _, field, *_ in _CLUSTER}),
        colocated=options.colocated,
        bucket_bytes=read_bytes(options.bucket_bytes, "--bucket-bytes"),
        buckets=options.buckets,
        node_once=options.node_once,
    )


def _check_picture(path: Path | None) -> None:
    """Find out before the work what would be wrong after it."""
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise UserError(f"--plot {path} is no picture that can be drawn; end its name with {' or '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}; make it first")


def _print(forecast: "Forecast", options: argparse.Namespace, seconds: float) -> None:
    from rich.console import Console

    from megarl.planning.report import facts, tables

    if options.json:
        said = {"command": options.command, "seconds": round(seconds, 4), **facts(forecast)}
        print(json.dumps({**said, **({"plot": str(options.plot)} if options.plot else {})}))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    with console.capture() as capture:
        for table in tables(forecast):
            console.print(table)
            console.print()
    # rich fills each line with blanks to the width.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
    console.print(f"planned in {say_seconds(seconds)}" + (f", drawn in {options.plot}" if options.plot else ""))
