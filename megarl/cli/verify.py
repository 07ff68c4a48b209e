"""Check the checksums of a checkpoint.

Uses the manifest written by `megarl convert` and `megarl export`, which covers every byte; for torch_dist checkpoints
of other programs, the checksums that torch writes with each chunk. Exits with 0 if all of them are right, with 1 if
something is damaged or missing, and with 2 if there are none.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli import outcome
from megarl.planning.amounts import say_bytes, say_count, say_seconds

if TYPE_CHECKING:
    from converters.examine import Verification

EXAMPLES = """examples:
  megarl verify megatron/qwen3
  megarl verify runs/mine/checkpoints/iter_0000200 --json
"""
TAKES_OVERRIDES = False
EXIT_DAMAGED = 1
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="HuggingFace folder or torch_dist checkpoint")
    outcome.add_workers(parser)
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Check them; 1 if something is damaged."""
    outcome.check_workers(options.workers)
    outcome.check_folder(options.folder, "give one with a checkpoint")
    from converters.examine import verify
    from megarl.cli.progress import ByteProgress

    start = time.perf_counter()
    with outcome.file_errors_in_a_sentence(), ByteProgress(quiet=options.json) as progress:
        found = verify(options.folder, workers=options.workers, progress=progress)
    seconds = time.perf_counter() - start
    facts = {
        "out": str(options.folder),
        "seconds": round(seconds, 4),
        "bytes": found.nbytes,
        "tensors": found.checked,
        "files": found.files,
        "intact": found.is_intact,
        "by_manifest": found.by_manifest,
        "damaged": found.damaged,
        "missing": found.missing,
        "unlisted": found.unlisted,
        "without_checksum": found.without_checksum,
    }
    outcome.print_outcome(options, _sentences(options.folder, found, seconds), facts)
    return 0 if found.is_intact else EXIT_DAMAGED


def _sentences(folder: Path, found: "Verification", seconds: float) -> list[str]:
    lines = [f"damaged: {each}" for each in found.damaged[:_SHOWN]]
    if len(found.damaged) > _SHOWN:
        lines.append(f"... and {len(found.damaged) - _SHOWN:,} more that are damaged")
    lines += [f"missing: {each}" for each in found.missing]
    lines += [f"not in the manifest: {each}" for each in found.unlisted]
    if found.without_checksum:
        lines.append(f"without a checksum: {found.without_checksum:,} chunks and objects")
    size, files = say_bytes(found.nbytes), say_count(found.files, "file")
    checked = f"{say_count(found.checked, 'checksum')} in {files}, {size}, {say_seconds(seconds)}"
    by = "its manifest" if found.by_manifest else "torch's own checksums, which cover no names and no shapes"
    return [*lines, f"{folder} is {'intact' if found.is_intact else 'DAMAGED'} by {by}: {checked}"]
