"""Options and row-by-row table of benchmarks with a row per model, engine and weight format."""

import argparse
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

from machine import at_least_one, describe, give_out

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")


def options_parser(
    about: str | None,
    *,
    models: Sequence[str] = FAMILIES,
    known_engines: Iterable[str],
    engines: Sequence[str],
    steps: int | None,
) -> argparse.ArgumentParser:
    """Options with the defaults of all `models`, these `engines`, and `steps`; None means each model's own steps."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))
    parser.add_argument("--engines", nargs="+", choices=list(known_engines), default=list(engines))
    default = str(steps) if steps else "its own number"
    parser.add_argument("--steps", type=at_least_one, default=steps, help=f"steps of each ({default})")
    parser.add_argument("--write", type=Path, help="file for the page; each row is also printed")
    return parser


def show_table(
    title: str, target: str, head: str, rows: Iterable[Sequence[str]], write: Path | None, *, told: str = ""
) -> None:
    """Print each row as soon as it is available, and write the page to a file if one is given.

    The command is `make benchmark-TARGET`; the text `told` is printed above the table.
    """
    page = [f"`make benchmark-{target}`, {date.today()}, {describe(ROOT)}.{told}", "", head]
    print("\n".join(page), flush=True)
    for cells in rows:
        page.append(f"| {' | '.join(cells)} |")
        print(page[-1], flush=True)
    if write:
        give_out("\n".join([f"# {title}", "", *page, ""]), write)
