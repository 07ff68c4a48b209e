"""Describe a checkpoint: model, parameters, dtypes, layout, bytes, and whether it is complete.

Accepts a HuggingFace folder or a torch_dist checkpoint of Megatron, and reads only its metadata.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli import outcome
from megarl.planning.amounts import say_bytes

if TYPE_CHECKING:
    from converters.examine import Inspection

EXAMPLES = """examples:
  megarl inspect Qwen3-30B-A3B
  megarl inspect megatron/qwen3 --json
  megarl inspect runs/mine/checkpoints --hf-config Qwen3-30B-A3B
"""
TAKES_OVERRIDES = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="HuggingFace folder or torch_dist checkpoint")
    outcome.add_hf_config(parser)
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the description."""
    outcome.check_folder(options.folder, "give one with a checkpoint")
    from dataclasses import asdict

    from converters.examine import inspect

    start = time.perf_counter()
    with outcome.file_errors_in_a_sentence():
        found = inspect(options.folder, hf_config_folder=options.hf_config)
    facts = {"out": str(options.folder), "seconds": round(time.perf_counter() - start, 4), **asdict(found)}
    facts["bytes"], facts["files"] = facts.pop("nbytes"), found.layout.files
    facts["dtypes"] = {name: {"tensors": number, "bytes": nbytes} for name, (number, nbytes) in found.dtypes.items()}
    facts["complete"] = found.problem is None
    outcome.print_outcome(options, outcome.table(_rows(found)), facts)
    return 0


def _rows(found: "Inspection") -> Iterator[tuple[str, str]]:
    yield "folder", found.folder
    yield "format", found.format + (", block FP8" if found.is_fp8 else "")
    if model := found.model:
        experts = f", {model.experts} experts" if model.experts else ""
        mtp = f", {model.mtp_layers} of multi-token prediction" if model.mtp_layers else ""
        tied = ", embedding and output tied" if model.tied else ""
        yield "model", f"{model.model_type}: {model.layers} layers{experts}{mtp}{tied}"
        yield "parameters", f"{model.parameters:,}, of which a token meets {model.parameters_per_token:,}"
    yield "tensors", f"{found.tensors:,} with {found.elements:,} elements, {say_bytes(found.nbytes)}"
    for name, (number, nbytes) in found.dtypes.items():
        yield f"  {name}", f"{number:,} tensors, {say_bytes(nbytes)}"
    layout = found.layout
    cut = f", {layout.chunks:,} chunks, the largest of {say_bytes(layout.largest_chunk_bytes)}"
    yield "files", f"{layout.files:,}{cut}"
    if layout.parallel:
        yield "saved for", ", ".join(f"{name} {size}" for name, size in layout.parallel.items())
    if layout.iteration is not None:
        yield "iteration", str(layout.iteration)
    if found.optimizer_bytes:
        yield "optimizer", say_bytes(found.optimizer_bytes)
    yield "checksums", "in a manifest" if found.manifest else "no manifest"
    yield "complete", "yes" if found.problem is None else f"{'no' if found.model else 'not known'}: {found.problem}"
