"""Whole quickstarts by model, engine and weight format: what the policy learned.

Each is `megarl quickstart` as users run it: warm-up, GRPO to the last step, and an export that a fresh engine must
confirm.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lab import FORMATS
from model_table import options_parser, show_table
from workload import MEGARL, environment

from converters.number_formats import AS_TRAINED

HEAD = (
    "| model | engine | weights | steps | accuracy at first | at last | of the export, afresh | refit |\n"
    "|---|---|---|---:|---:|---:|---:|---|"
)


def summary_of(family: str, engine: str, weights: str, steps: int | None, output: Path) -> dict[str, Any]:
    """Summary of a quickstart. Raises CalledProcessError if it fails, for example without having learned."""
    held_in = () if weights == AS_TRAINED else ("--weights", weights)
    length = () if steps is None else ("--steps", str(steps))
    options = ("--model", family, "--engine", engine, *held_in, *length, "--output-dir", str(output))
    command = (*MEGARL, "quickstart", *options)
    subprocess.run(command, env=environment(threads=1), check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((output / "summary.json").read_text()))


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[Sequence[str]]:
    """Yield the row of each quickstart."""
    for family, engine, weights in product(options.models, options.engines, options.weights):
        summary = summary_of(family, engine, weights, options.steps, scratch / f"{family}_{engine}_{weights}")
        accuracies = (f"{summary[f'accuracy_{when}']:.3f}" for when in ("first", "last", "export"))
        yield family, engine, weights, str(summary["steps"]), *accuracies, summary["refit_path"]


def main() -> None:
    """Run all of them, and print the table or write it to a file."""
    parser = options_parser(__doc__, known_engines=FORMATS, engines=["vllm", "sglang"], steps=None)
    parser.add_argument("--weights", nargs="+", default=[AS_TRAINED, "fp8_block"], help="what engines hold weights in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        show_table("Quickstarts to their last step", "quickstarts", HEAD, rows(options, Path(scratch)), options.write)


if __name__ == "__main__":
    main()
