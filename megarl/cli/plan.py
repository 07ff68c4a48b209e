"""Predict a step from config.json alone: whether it fits, how long each stage takes, and what the refit moves.

Computes the memory of trainer and engines and the seconds of rollout, log-probs, update and refit, and tells which size
changes them most; --search proposes sizes. The bytes of a refit are counted for every rank, NIC and node and compared
with the lower bound, and every message is simulated. Needs no GPU and no weights. Exits with 1 if it does not fit.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.durable import whole_file
from converters.errors import UserError, names_as_given
from megarl.cli import outcome, plan_cluster, plan_recipe, plan_step
from megarl.cli.parallel_options import OPTION_OF_SIZE, add_parallel_sizes, parallel_sizes
from megarl.cli.plan_cluster import described_cluster
from megarl.config.folder import model_config_file
from megarl.planning.amounts import say_count, say_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from megarl.planning.forecast import Forecast
    from megarl.planning.refit import PlannedRefit
    from megarl.planning.step.prediction import StepPrediction

EXAMPLES = """examples:
  megarl plan --model deepseek_v3 --gpus 512 --tp 4 --pp 16 --ep 32 --etp 1 \\
      --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 --engine-tp 32 --replicas 8
  megarl plan --model kimi_k2 --gpus 256 --tp 8 --pp 8 --ep 32 --etp 1 --decoder-last-pipeline-num-layers 5 \\
      --device H200 --engine-ep 32 --engine-dtype fp8 --replicas 4 --plot plan.png
  megarl plan --config-name grpo_deepseek_v3 --model deepseek_v3 --engine-dtype fp8
  megarl plan --model qwen3_235b --gpus 128 --device H200 --search --colocated --max-response-tokens 8192
  megarl plan --model config.json --tp 2 --ep 2 --pp 2 --engine-tp 2 --cores 2 --pack-gbyte 22 --unpack-gbyte 24 \\
      --message-us 250 --bucket-bytes 8MB
  megarl plan --model Qwen3-30B-A3B --gpus 16 --tp 2 --ep 8 --etp 1 --engine-tp 4 --replicas 4 --colocated --json
"""
TAKES_OVERRIDES = True
_PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 120
_OPTIONS = {
    **OPTION_OF_SIZE,
    "use_torch_fsdp2": "--use-torch-fsdp2",
    **plan_cluster.OPTION_OF_FIELD,
    **plan_step.OPTION_OF_FIELD,
    **{f"the refit's {name}": f"--{name.replace('_', '-')}" for name in ("replicas", "bucket_bytes", "buckets")},
    **{name: f"--{name.replace('_', '-')}" for name in ("engine_tp", "engine_ep", "engine_dtype")},
    "this command": "megarl plan",
}
"""Names in error messages of other modules -> the options that set them."""
_MOST_GPUS = 16_384
_MOST_ENGINE_RANKS = 8_192
"""Every pair of an engine rank and another rank has a counter: this many take 2 to 4 GB of memory, and a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="config.json, a folder with one, or a name in configs/models (default: the recipe's)",
    )
    trainer = parser.add_argument_group("trainer")
    trainer.add_argument("--gpus", type=int, metavar="N", help="ranks (default: as few as the sizes allow)")
    add_parallel_sizes(trainer)
    trainer.add_argument(
        "--use-torch-fsdp2",
        action="store_true",
        help="ranks of data and context parallelism have rows of every weight, as with megatron.use_torch_fsdp2=true",
    )
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
        help="of matrices: bf16, fp8, or another that rollout.weights has: fp8_block_ue8m0, int8_channel, mxfp8 (bf16)",
    )
    engines.add_argument("--replicas", type=int, metavar="N", help="engines (1)")
    engines.add_argument(
        "--engine-model", metavar="NAME", help="what the engines have loaded, if it is another file than --model"
    )
    plan_cluster.add_arguments(parser)
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
    plan_step.add_arguments(parser)
    plan_recipe.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Count, predict, simulate, and print the results."""
    with names_as_given(_OPTIONS):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    # Before torch is imported, which takes seconds.
    plan_recipe.check_overrides(options)
    _check_models(options)
    from megarl.planning.forecast import Forecast
    from megarl.planning.step.prediction import StepPrediction

    start = time.perf_counter()
    _check_picture(options.plot)
    _check_search(options)
    plan_recipe.complete(options)
    _check_gpus(options.gpus)
    if options.search:
        return _search(options)
    with outcome.streaming(), outcome.file_errors_in_a_sentence():
        refit = planned_refit(options)
        _check_ranks(refit)
        # Before the slow counting and drawing, since it may raise an error.
        step = plan_step.planned_step(options, refit) if refit.cluster.cores is None else None
        forecast = Forecast.of(refit, refit.traffic())
        if options.plot:
            from megarl.planning.picture import draw_forecast

            with whole_file(options.plot) as partial:
                draw_forecast(forecast).savefig(partial, format=options.plot.suffix[1:])
        if step:
            staged = 0 if step.sends_whole_tensors else int(forecast.traffic.staged.max())
            step = replace(step, refit_seconds=forecast.replay.seconds, staged_bytes=staged)
        prediction = StepPrediction(step) if step else None
        _print(forecast, prediction, options, time.perf_counter() - start)
    if prediction is None or prediction.fits:
        return 0
    print(f"megarl: this plan does not fit: {prediction.why_not()}", file=sys.stderr)
    return 1


def _search(options: argparse.Namespace) -> int:
    from megarl.planning.search import search
    from megarl.planning.step.report import proposal_facts, proposal_tables

    if options.gpus is None:
        raise UserError("megarl plan --search needs the number of GPUs: give --gpus")
    gpus, options.gpus = options.gpus, None
    with outcome.file_errors_in_a_sentence():
        refit = planned_refit(options)
        proposal = search(plan_step.planned_step(options, refit), gpus)
    if options.json:
        print(json.dumps({"command": options.command, "fitting": proposal.fitting, "best": proposal_facts(proposal)}))
    else:
        _print_tables(proposal_tables(proposal))
    return 0


def planned_refit(options: argparse.Namespace) -> "PlannedRefit":
    """Read the refit to plan from the options. Raises UserError if it is not possible."""
    from megarl.planning.refit import PlannedRefit, engine_sizes, read_model
    from megatron_ext.options.supported_options import ADAPTER_IN_ROWS

    if options.use_torch_fsdp2 and options.lora:
        raise UserError(ADAPTER_IN_ROWS)
    architecture = engine_architecture = read_model(options.model, "--model")
    if options.engine_model:
        engine_architecture = read_model(options.engine_model, "--engine-model")
    trainer, engine = parallel_sizes(options, options.gpus), engine_sizes(options.engine_tp, options.engine_ep)
    trainer = replace(trainer, use_torch_fsdp2=options.use_torch_fsdp2)
    return PlannedRefit(
        architecture=architecture,
        engine_architecture=engine_architecture,
        trainer=trainer,
        engine=engine,
        replicas=options.replicas,
        number_format=options.engine_dtype,
        cluster=described_cluster(options, trainer.world_size + options.replicas * engine.world_size),
        colocated=options.colocated,
        bucket_bytes=options.bucket_bytes,
        buckets=options.buckets,
        node_once=options.node_once,
    )


def _check_models(options: argparse.Namespace) -> None:
    """Fail early if a config.json is missing."""
    for option, place in (("--model", options.model), ("--engine-model", options.engine_model)):
        if place is not None:
            model_config_file(place, option)


def _check_search(options: argparse.Namespace) -> None:
    """Raise UserError for options that a search would ignore, before a recipe completes the options."""
    if not options.search:
        return
    if options.plot is not None:
        raise UserError(f"--plot {options.plot} draws the plan of given sizes, and --search has none: leave one out")
    for name in plan_recipe.SEARCHED:
        if (size := getattr(options, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {size} is one of the sizes that --search proposes: leave one of the two out")


def _check_gpus(gpus: int | None) -> None:
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus} leaves nobody to train; give at least 1")
    if gpus is not None and gpus > _MOST_GPUS:
        raise UserError(f"--gpus {gpus} is more than megarl plan counts; give at most {_MOST_GPUS:,}")


def _check_ranks(refit: "PlannedRefit") -> None:
    """Raise UserError for more ranks than can be counted individually."""
    if refit.trainer.world_size > _MOST_GPUS:
        raise UserError(
            f"the trainer's sizes make {refit.trainer.world_size:,} ranks, and megarl plan counts {_MOST_GPUS:,} at"
            " most: lower them"
        )
    if refit.destinations > _MOST_ENGINE_RANKS:
        raise UserError(
            f"the engines have {refit.destinations:,} ranks, and megarl plan counts {_MOST_ENGINE_RANKS:,} at most:"
            " lower --replicas, --engine-tp or --engine-ep"
        )


def _check_picture(path: Path | None) -> None:
    """Fail before the work, and not after it, if the picture cannot be written."""
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise UserError(f"--plot {path} is no picture that can be drawn; end its name with {' or '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}; make it first")


def _print(
    forecast: "Forecast", prediction: "StepPrediction | None", options: argparse.Namespace, seconds: float
) -> None:
    from megarl.planning.report import facts, tables
    from megarl.planning.step.knobs import turned_knobs
    from megarl.planning.step.report import step_facts, step_tables

    if options.json:
        said = {"command": options.command, "seconds": round(seconds, 4), **facts(forecast)}
        said["not_planned"] = options.not_planned
        if prediction is not None:
            said["step"] = step_facts(prediction)
        print(json.dumps({**said, **({"plot": str(options.plot)} if options.plot else {})}))
        return
    _print_tables(tables(forecast, _OPTIONS))
    if prediction is not None:
        _print_tables(step_tables(prediction, turned_knobs(prediction.step)))
    if others := ", ".join(f"{name} of {say_count(ranks, 'rank')}" for name, ranks in options.not_planned.items()):
        print(
            f"not planned: {others}, with GPUs or memory and time of their own; megarl rehearse counts their memory\n"
        )
    print(f"planned in {say_seconds(seconds)}" + (f", drawn in {options.plot}" if options.plot else ""))


def _print_tables(tables: "Iterable[Table]") -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
            console.print()
    # rich pads each line with blanks to the width.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
