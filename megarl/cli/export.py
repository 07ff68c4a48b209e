"""Export a Megatron checkpoint to a HuggingFace folder by streaming: safetensors, index, config and tokenizer.

Accepts any torch_dist checkpoint in any layout: one written by `megarl convert`, by a training run, or saved by
megatron.core.dist_checkpointing. An interrupted export continues when the same command is run again.
"""

import argparse
import time
from pathlib import Path

from megarl.cli import outcome
from megarl.planning.amounts import read_bytes, say_bytes, say_count, say_seconds

EXAMPLES = """examples:
  megarl export --megatron megatron/qwen3 --out exported/qwen3
  megarl export --megatron runs/mine/checkpoints --hf-config Qwen3-30B-A3B --out exported/mine
  megarl export --megatron megatron/deepseek --fp8 --shard-size 4GiB --out exported/deepseek
  megarl export --megatron megatron/deepseek --prediction-layers 0 --out policy
"""
TAKES_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(interrupted=outcome.CONTINUES)
    parser.add_argument(
        "--megatron", required=True, type=Path, metavar="DIR", help="torch_dist checkpoint, or a folder of several"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="folder with the model's config.json and tokenizer (default: those the checkpoint came with)",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="matrices of the layers in block FP8: e4m3, a scale per 128x128"
    )
    parser.add_argument(
        "--prediction-layers",
        type=int,
        choices=[0],
        metavar="0",
        help="leave layers for multi-token prediction out (default: all that the checkpoint has)",
    )
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a file: 5GB, 500MB, 2GiB (%(default)s)")
    outcome.add_workers(parser)
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Export."""
    shard_size_bytes = read_bytes(options.shard_size, "--shard-size")
    outcome.check_workers(options.workers)
    outcome.check_folder(options.megatron, "give the path of a torch_dist checkpoint or of a folder of several")
    from converters.megatron_to_hf import export_checkpoint
    from megarl.cli.progress import ByteProgress

    start = time.perf_counter()
    with outcome.streaming(), outcome.file_errors_in_a_sentence(), ByteProgress(quiet=options.json) as progress:
        plan = export_checkpoint(
            options.megatron,
            options.out,
            hf_config_folder=options.hf_config,
            fp8=options.fp8,
            shard_size_bytes=shard_size_bytes,
            workers=options.workers,
            progress=progress,
            without_mtp=options.prediction_layers == 0,
        )
    seconds = time.perf_counter() - start
    facts = {
        "out": str(options.out),
        "seconds": round(seconds, 4),
        "bytes": plan.nbytes,
        "tensors": len(plan.shapes),
        "files": len(plan.files),
        "left_out_mtp_layers": plan.left_out_mtp_layers,
    }
    size, files = say_bytes(plan.nbytes), say_count(len(plan.files), "file")
    rate = f"{say_bytes(plan.nbytes / seconds)}/s"
    sentence = f"{options.out}: {len(plan.shapes):,} tensors, {size} in {files}, {say_seconds(seconds)} ({rate})"
    sentences = [sentence]
    if plan.left_out_mtp_layers:
        layers = say_count(plan.left_out_mtp_layers, "layer")
        why = (
            f"{layers} left out"
            if options.prediction_layers == 0
            else f"the checkpoint does not have the {layers} that its config.json names"
        )
        sentences.append(
            f"without multi-token prediction: {why}, and the config.json written says num_nextn_predict_layers 0"
        )
    outcome.print_outcome(options, sentences, facts)
    return 0
