"""Rehearse a recipe at its real size without its cluster: does every phase fit into its GPUs, and by how much.

Every distinct rank is built from the real Megatron modules in a simulated world of the job's size, with fake tensors
that have shapes but no memory. Its parameters are compared with the layout that weights are converted by, its state is
counted to the byte, and micro-batches run forward and backward. Every worker of an engine is built from the engine's
own modules; its own loader shows where each weight goes, and the refit is planned. Kernels, speed and the optimizer's
step are not rehearsed. Exits with 1 if something does not fit or cannot be placed.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from converters.errors import UserError, names_as_given
from megarl.cli import outcome, recipe
from megarl.planning.amounts import read_bytes, say_bytes, say_count, say_seconds
from megarl.process.phase import phase

if TYPE_CHECKING:
    from megarl.rehearsal.job import RehearsedJob
    from megarl.rehearsal.need import Gpu, Need
    from megarl.schema import MegarlConfig

EXAMPLES = """examples:
  megarl rehearse --config-name grpo_deepseek_v3 --prediction-layers 0
  megarl rehearse --config-name grpo_kimi_k2 --gpu-memory 141GB
  megarl rehearse --config-name grpo_qwen3_moe model.path=Qwen3-30B-A3B loop.max_tokens_per_micro_batch=32768 --json
"""
TAKES_OVERRIDES = True
EXIT_DOES_NOT_FIT = 1
_NAMES = {
    "this command": "megarl rehearse",
    "engine_tp": "the tensor-parallel size of rollout.engine_args",
    "engine_ep": "the expert-parallel size of rollout.engine_args",
}
"""Names in error messages of other modules -> the parts of the recipe that set them."""
_NOT_REHEARSED = (
    "Not rehearsed: kernels and their workspaces but for an engine's experts, speed, the optimizer's step, and tokens"
    " that go to some experts more than to others. Modules are those for a CPU, unfused, whose activations are a little"
    " more than a GPU's; an engine's kernels for a GPU may keep weights in another order."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; overrides and Megatron's flags are left over."""
    parser.add_argument("--config-name", metavar="NAME", required=True, help="recipe: a file of configs/ without .yaml")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own recipes, looked in first")
    recipe.add_megatron_args(parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a folder with config.json, or a name in configs/models (default: the recipe's model.path or model.name)",
    )
    parser.add_argument(
        "--prediction-layers",
        type=int,
        metavar="N",
        help="layers for multi-token prediction, in place of those of config.json",
    )
    parser.add_argument("--gpu-memory", default="80GB", metavar="SIZE", help="memory of a GPU (%(default)s)")
    parser.add_argument(
        "--keep-free",
        default="4GB",
        metavar="SIZE",
        help="memory of a GPU for CUDA, NCCL and fragmentation, which nothing here counts (%(default)s)",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a machine (%(default)s)")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines that there are (default: as many as it takes)")
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Rehearse and print; 1 if something does not fit."""
    with names_as_given(_NAMES):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    # Megatron-core warns on import about missing optional packages, which the rehearsal does not need.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from megarl.rehearsal import fake_world  # noqa: F401 - before anything of Megatron
    from megarl.rehearsal.job import check_job, rank_models, rehearse_job
    from megarl.rehearsal.need import Gpu
    from megarl.rehearsal.placing import place_job, say_placement

    start = time.perf_counter()
    gpu = Gpu(read_bytes(options.gpu_memory, "--gpu-memory"), read_bytes(options.keep_free, "--keep-free"))
    _check_options(options, gpu)
    config, hf_config = _read(options)
    models = rank_models(config, hf_config)
    check_job(config, hf_config, models)
    placement = None
    try:
        placement = place_job(config, models, gpus_per_node=options.gpus_per_node, nodes=options.nodes)
        placed = say_placement(placement, options.gpus_per_node)
    except UserError as error:
        placed = f"not placed: {error}"
        # Printed before the rehearsal, which takes minutes for a large job.
        print(f"megarl: {placed}; what each rank needs is rehearsed all the same", file=sys.stderr, flush=True)
    with phase("rehearsing ranks and an engine"):
        job = rehearse_job(config, hf_config, models, placement, gpu, options.gpus_per_node)
    _print(options, job, placed, config, time.perf_counter() - start)
    return 0 if job.fits and placement else EXIT_DOES_NOT_FIT


def _check_options(options: argparse.Namespace, gpu: "Gpu") -> None:
    if gpu.room <= 0:
        raise UserError(
            f"a GPU of --gpu-memory {options.gpu_memory} has nothing left when --keep-free {options.keep_free} is kept"
            " free; raise the one or lower the other (80 is 80 bytes, 80GB a GPU)"
        )
    for option, count in (("--gpus-per-node", options.gpus_per_node), ("--nodes", options.nodes)):
        if count is not None and count < 1:
            raise UserError(f"{option} {count} is too small; give at least 1")


def _read(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the policy's config.json. Raises UserError if one of them cannot be read."""
    from megarl.config.purpose import check_plannable
    from megarl.config.trained_model import read_trained_config
    from megarl.config.validate import check_planned
    from megarl.models.policy import check_sizes

    config = recipe.read_open(options)
    check_plannable(config, options.config_name, options.command)
    check_planned(config)
    place, option = (options.model, "--model") if options.model else (config.model.path, "model.path")
    hf_config = read_trained_config(place, option, options.prediction_layers)
    if not options.model and config.model.name:
        check_sizes(config.model.name, hf_config, place)
    return config, hf_config


def _print(
    options: argparse.Namespace, job: "RehearsedJob", placed: str, config: "MegarlConfig", seconds: float
) -> None:
    """Print what is needed, and what would help if something does not fit."""
    from megarl.rehearsal.advice import advise

    if options.json:
        needs = [{**vars(need), "total": need.total, "free": need.free} for need in job.needs]
        said = {
            "command": options.command,
            "seconds": round(seconds, 1),
            "placed": placed,
            "needs": needs,
            "engine": _engine_facts(job),
            "refit": {**vars(job.refit), "of_ranks": {str(rank): size for rank, size in job.refit.of_ranks.items()}},
        }
        print(json.dumps(said))
    else:
        _print_table(job.needs)
        print(f"{placed}\n{_say_engine(job)}\n{_say_refit(job, config.rollout.replicas)}")
        print(_say_room(job))
        print(f"{_NOT_REHEARSED}\nrehearsed in {say_seconds(seconds)}")
    if not job.fits:
        advice = advise(job.worst, {need.role for need in job.needs}, config.megatron)
        print(f"megarl: {_too_large(job.worst, options)}: {advice}", file=sys.stderr)


def _engine_facts(job: "RehearsedJob") -> dict[str, Any]:
    facts = {name: value for name, value in vars(job.engine).items() if name != "traces"}
    return {**facts, "cache_bytes": job.cache_bytes, "tokens": job.engine.tokens(job.cache_bytes)}


def _say_engine(job: "RehearsedJob") -> str:
    """Say how many tokens fit into an engine's KV cache.

    Example: "an engine has room for 4,000,000 tokens: 434 sequences of 9,216, its longest"
    """
    engine = job.engine
    tokens = engine.tokens(job.cache_bytes)
    longest = say_count(tokens // engine.longest_tokens, "sequence")
    room = f"an engine has room for {tokens:,} tokens: {longest} of {engine.longest_tokens:,}, its longest"
    return room if engine.traces else f"{room}; counted in closed form: {engine.why_not_direct}"


def _say_refit(job: "RehearsedJob", replicas: int) -> str:
    from megarl.refit.direct import staging_note

    refit = job.refit
    if refit.why_not_direct:
        return f"the refit was not planned: {refit.why_not_direct}"
    return (
        f"a refit moves {say_bytes(refit.sent)} from the trainer to {say_count(replicas, 'engine')} and"
        f" {say_bytes(refit.relayed)} from worker to worker; the busiest rank sends {say_bytes(refit.busiest)}"
        f"{staging_note(refit.staged)}"
    )


def _say_room(job: "RehearsedJob") -> str:
    """Say whether everything fits, and where the least memory is left.

    Example: "all phases fit; least is left in trainer, update (stages 1 to 6, 96 ranks): 5.27 GB"
    """
    if not job.fits:
        short = sum(need.free < 0 for need in job.needs)
        return f"{short} of {say_count(len(job.needs), 'line')} above lack memory"
    least = job.worst
    return f"all phases fit; least is left in {least.role}, {least.phase} ({least.who}): {say_bytes(least.free)}"


def _print_table(needs: "Sequence[Need]") -> None:
    columns = list(dict.fromkeys(name for need in needs for name in need.parts))
    rows = [["role", "phase", "who", *columns, "all", "free"]]
    for need in needs:
        parts = [say_bytes(need.parts[name]) if name in need.parts else "" for name in columns]
        free = say_bytes(need.free) if need.free >= 0 else f"{say_bytes(-need.free)} short"
        rows.append([need.role, need.phase, need.who, *parts, say_bytes(need.total), free])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _too_large(need: "Need", options: argparse.Namespace) -> str:
    return (
        f"{need.role} ({need.who}) needs {say_bytes(need.total)} in its {need.phase}, {say_bytes(-need.free)} more than"
        f" there is on a GPU of {options.gpu_memory} with {options.keep_free} kept free, most of it"
        f" for {need.largest}"
    )
