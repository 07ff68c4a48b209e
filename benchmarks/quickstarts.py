"""Whole quickstarts, by model, engine and what the engine holds its weights in: what the policy learned.

Each is `megarl quickstart` as anyone runs it: warm-up, GRPO to the last step, and an export that a fresh engine has to
confirm.
"""

import argparse
import json
import subprocess
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from lab import FAMILIES, FORMATS, ROOT
from machine import at_least_one, describe, give_out
from workload import MEGARL, environment

from converters.number_formats import AS_TRAINED

HEAD = (
    "| model | engine | weights | steps | accuracy at first | at last | of the export, afresh | refit |\n"
    "|---|---|---|---:|---:|---:|---:|---|"
)


def summary_of(family: str, engine: str, weights: str, steps: int | None, output: Path) -> dict[str, Any]:
    """Summary of a quickstart. Raises CalledProcessError where it fails: it has not learned, say."""
    held_in = () if weights == AS_TRAINED else ("--weights", weights)
    length = () if steps is None else ("--steps", str(steps))
    options = ("--model", family, "--engine", engine, *held_in, *length, "--output-dir", str(output))
    command = (*MEGARL, "quickstart", *options)
    subprocess.run(command, env=environment(threads=1), check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((output / "summary.json").read_text()))


def row(family: str, engine: str, weights: str, summary: dict[str, Any]) -> str:
    """The row of a quickstart."""
    accuracies = (f"{summary[f'accuracy_{when}']:.3f}" for when in ("first", "last", "export"))
    return f"| {' | '.join((family, engine, weights, str(summary['steps']), *accuracies, summary['refit_path']))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--engines", nargs="+", choices=FORMATS, default=["vllm", "sglang"])
    parser.add_argument("--weights", nargs="+", default=[AS_TRAINED, "fp8_block"], help="what engines hold weights in")
    parser.add_argument("--steps", type=at_least_one, help="steps of each, which else has its own number")
    parser.add_argument("--write", type=Path, help="file for the page; each row is also printed")
    options = parser.parse_args()
    page = [f"`make benchmark-quickstarts`, {date.today()}, {describe(ROOT)}.", "", HEAD]
    print("\n".join(page), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for family in options.models:
            for engine in options.engines:
                for weights in options.weights:
                    output = Path(scratch) / f"{family}_{engine}_{weights}"
                    summary = summary_of(family, engine, weights, options.steps, output)
                    page.append(row(family, engine, weights, summary))
                    print(page[-1], flush=True)
    if options.write:
        give_out("\n".join(["# Quickstarts to their last step", "", *page, ""]), options.write)


if __name__ == "__main__":
    main()
