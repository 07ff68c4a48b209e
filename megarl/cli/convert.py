"""Convert a HuggingFace folder to a Megatron checkpoint by streaming, without a model, GPU or process group.

Writes Megatron's torch_dist format with the files that Megatron-LM's loader expects, and a checksum of every chunk.
The chunks match the given parallel sizes, so that each rank reads whole ones; the checkpoint loads at any other sizes,
too. An interrupted conversion continues when the same command is run again.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from converters.errors import names_as_given
from megarl.cli import outcome
from megarl.cli.parallel_options import OPTION_OF_SIZE, add_parallel_sizes, parallel_sizes
from megarl.planning.amounts import say_bytes, say_count, say_seconds

if TYPE_CHECKING:
    from converters.hf_to_megatron import ConversionPlan

EXAMPLES = """examples:
  megarl convert --hf Qwen3-30B-A3B --tp 2 --ep 4 --out megatron/qwen3
  megarl convert --hf DeepSeek-V3 --tp 8 --pp 16 --ep 32 --decoder-last-pipeline-num-layers 1 \\
      --dtype bf16 --out megatron/deepseek
  megarl convert --hf DeepSeek-V3 --tp 8 --pp 16 --ep 32 --decoder-last-pipeline-num-layers 1 \\
      --out megatron/deepseek --dry-run
"""
TAKES_OVERRIDES = False
_DTYPES = ("keep", "bf16", "fp32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(interrupted=outcome.CONTINUES)
    parser.add_argument("--hf", required=True, type=Path, metavar="DIR", help="HuggingFace folder")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    add_parallel_sizes(parser)
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="keep", help="of the weights (default: keep; FP8 becomes bf16 then)"
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="pad the vocabulary to a multiple of this times --tp, as Megatron-LM does (%(default)s)",
    )
    parser.add_argument(
        "--padded-vocab-size",
        type=int,
        metavar="N",
        help="pad the vocabulary to this, where a run has its own size, as in Megatron-LM",
    )
    parser.add_argument("--dry-run", action="store_true", help="plan from config.json alone, print it, write nothing")
    outcome.add_workers(parser)
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, or only print the plan."""
    outcome.check_workers(options.workers)
    outcome.check_folder(options.hf, "give the path of a model in HuggingFace form")
    from converters.hf_to_megatron import convert_checkpoint
    from megarl.cli.progress import ByteProgress

    start = time.perf_counter()
    with names_as_given(OPTION_OF_SIZE), outcome.streaming(), outcome.file_errors_in_a_sentence():
        if options.dry_run:
            return _dry_run(options, start)
        with ByteProgress(quiet=options.json) as progress:
            plan = convert_checkpoint(
                options.hf,
                options.out,
                parallel_sizes(options),
                dtype=options.dtype,
                vocabulary_multiple=options.make_vocab_size_divisible_by,
                padded_vocabulary=options.padded_vocab_size,
                workers=options.workers,
                progress=progress,
            )
    seconds = time.perf_counter() - start
    facts = _facts(plan, options, seconds)
    rate = f"{say_bytes(plan.nbytes / seconds)}/s"
    sentence = (
        f"{options.out}: {facts['tensors']:,} tensors in {facts['chunks']:,} chunks, {say_bytes(plan.nbytes)} in"
        f" {say_count(facts['files'], 'file')}, {say_seconds(seconds)} ({rate})"
    )
    outcome.print_outcome(options, [sentence, _how_to_use(plan, options.out)], facts)
    return 0


def _how_to_use(plan: "ConversionPlan", out: Path) -> str:
    from converters.hf_to_megatron import FLAGS

    if plan.beyond_megatron_lm:
        return (
            "Megatron-LM's flags cannot say all of this model, so that it would compute another one"
            f" ({plan.beyond_megatron_lm}): there is no {FLAGS}"
        )
    return f"with Megatron-LM: pretrain_gpt.py $(cat {quote(str(out / FLAGS))}) --load {quote(str(out))} ..."


def _dry_run(options: argparse.Namespace, start: float) -> int:
    from converters.dry_run import plan_from_config

    parallel = parallel_sizes(options)
    plan = plan_from_config(
        options.hf,
        parallel,
        dtype=options.dtype,
        vocabulary_multiple=options.make_vocab_size_divisible_by,
        padded_vocabulary=options.padded_vocab_size,
    )
    seconds = time.perf_counter() - start
    facts = {**_facts(plan, options, seconds), "ranks": parallel.world_size, "dry_run": True}
    outcome.print_outcome(options, ["nothing is written; the plan:", *outcome.table(_rows(facts))], facts)
    return 0


def _facts(plan: "ConversionPlan", options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for tensor in plan.contents.tensors.values():
        for chunk in tensor.chunks:
            sizes[chunk.file] += chunk.length
    for stored in set(plan.contents.objects.values()):
        sizes[stored.file] += stored.length
    return {
        "out": str(options.out),
        "seconds": round(seconds, 4),
        "bytes": plan.nbytes,
        "tensors": len(plan.contents.tensors),
        "chunks": len(plan.targets),
        "files": len(sizes),
        "largest_file_bytes": max(sizes.values()),
        "padded_vocabulary": plan.padded_vocabulary,
    }


def _rows(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "for", say_count(facts["ranks"], "rank")
    yield "tensors", f"{facts['tensors']:,} in {facts['chunks']:,} chunks"
    yield "files", f"{facts['files']:,}, the largest of {say_bytes(facts['largest_file_bytes'])}"
    yield "bytes", f"{facts['bytes']:,} ({say_bytes(facts['bytes'])})"
    yield "vocabulary", f"padded to {facts['padded_vocabulary']:,}"
    yield "planned in", say_seconds(facts["seconds"])
