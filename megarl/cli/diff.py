"""Tell whether two checkpoints, each a HuggingFace folder or a torch_dist checkpoint, are the same model.

Compares all tensors by their HuggingFace names, value by value, a few MB at a time; block FP8 is dequantised. Exits
with 0 if they are the same, and with 1 if they differ. Equal values in another dtype count as the same.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.cli import outcome
from megarl.planning.amounts import say_bytes, say_seconds

if TYPE_CHECKING:
    from converters.examine import Difference, ValueDifference

EXAMPLES = """examples:
  megarl diff Qwen3-30B-A3B megatron/qwen3
  megarl diff runs/mine/checkpoints/iter_0000100 runs/mine/checkpoints/iter_0000200 --hf-config Qwen3-30B-A3B
  megarl diff DeepSeek-V3 exported/deepseek --limit 3 --json
"""
TAKES_OVERRIDES = False
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", type=Path, metavar="A", help="HuggingFace folder or torch_dist checkpoint")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="name so many of each kind (%(default)s)")
    outcome.add_hf_config(parser)
    outcome.add_workers(parser)
    outcome.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Compare; 1 if they differ."""
    outcome.check_workers(options.workers)
    if options.limit < 0:
        raise UserError(f"--limit {options.limit} is less than nothing; give 0 or more")
    for folder in (options.a, options.b):
        outcome.check_folder(folder, "give one with a checkpoint")
    from converters.examine import compare
    from megarl.cli.progress import ByteProgress

    start = time.perf_counter()
    with outcome.streaming(), outcome.file_errors_in_a_sentence(), ByteProgress(quiet=options.json) as progress:
        found = compare(
            options.a, options.b, hf_config_folder=options.hf_config, workers=options.workers, progress=progress
        )
    seconds = time.perf_counter() - start
    lines = [*_lines(found, options.limit), _verdict(found, options, seconds)]
    outcome.print_outcome(options, lines, _facts(found, options, seconds))
    return 0 if found.is_same else EXIT_DIFFERENT


def _lines(found: "Difference", limit: int) -> Iterator[str]:
    kinds: Sequence[tuple[str, Iterable[str]]] = (
        ("only in A", found.only_in_a),
        ("only in B", found.only_in_b),
        ("another shape", [f"{name}: {list(a)} in A, {list(b)} in B" for name, (a, b) in found.shapes.items()]),
        ("other values", [_say(each) for each in found.values]),
        ("config.json", [f"{name} = {a!r} in A, {b!r} in B" for name, (a, b) in found.config.items()]),
    )
    for kind, texts in kinds:
        listed = list(texts)
        yield from (f"{kind}: {text}" for text in listed[:limit])
        if len(listed) > limit:
            yield f"{kind}: ... and {len(listed) - limit:,} more" if limit else f"{kind}: {len(listed):,}"
    for (a, b), number in found.dtypes.items():
        yield f"other types: {number:,} tensors are in {a} in A and in {b} in B"


def _say(value: "ValueDifference") -> str:
    parts = [f"{value.elements:,} of {value.of:,} elements, first at {list(value.first)}"]
    if value.elements > value.not_finite:
        parts.append(f"by up to {value.largest:.3g}, relative {value.largest_relative:.3g}")
    if value.not_finite:
        parts.append(f"{value.not_finite:,} with NaN or infinity")
    if value.is_rounding:
        parts.append("no more than rounding to the narrower type")
    return f"{value.name}: {', '.join(parts)}"


def _verdict(found: "Difference", options: argparse.Namespace, seconds: float) -> str:
    compared = f"{found.compared:,} tensors compared, {say_bytes(found.nbytes)}, {say_seconds(seconds)}"
    if not found.is_same:
        rounding = ", by no more than rounding" if found.is_rounding else ""
        return f"{options.a} and {options.b} DIFFER{rounding}: {compared}"
    types = ", in other types" if found.dtypes else ""
    if not found.has_compared_config:
        why = "config.json not, since one has none or it is of an unknown model"
        return f"{options.a} and {options.b} have the same weights{types}: {compared}; {why}"
    return f"{options.a} and {options.b} are the same model{types}: {compared}"


def _facts(found: "Difference", options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    limit = options.limit
    return {
        "out": None,
        "seconds": round(seconds, 4),
        "bytes": found.nbytes,
        "tensors": found.compared,
        "files": None,
        "same": found.is_same,
        "only_rounding": found.is_rounding,
        "different": len(found.values),
        "values": [asdict(each) for each in found.values[:limit]],
        "only_in_a": list(found.only_in_a[:limit]),
        "only_in_b": list(found.only_in_b[:limit]),
        "shapes": dict(list(found.shapes.items())[:limit]),
        "dtypes": [{"a": a, "b": b, "tensors": number} for (a, b), number in found.dtypes.items()],
        "config_compared": found.has_compared_config,
        "config": {name: [repr(a), repr(b)] for name, (a, b) in found.config.items()},
    }
