"""Report of a run for the user: a picture of the curves, summary.json, and a table on the console."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from converters.durable import whole_file
from megarl.tracking.curves import History, draw_curves
from megarl.tracking.versions import versions


@dataclass(frozen=True)
class ReportPaths:
    """Paths of a report's files."""

    curves: Path
    summary: Path


def write_report(output_dir: Path, history: History, summary: Mapping[str, Any]) -> ReportPaths:
    """Write curves.png of `history` (as returned by `read_history`) and summary.json to `output_dir`.

    summary.json contains `summary` and, under "versions", the version of every component. Each file is written
    atomically.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(curves=output_dir / "curves.png", summary=output_dir / "summary.json")
    text = json.dumps({**summary, "versions": versions()}, indent=2) + "\n"
    with whole_file(paths.summary) as summary_file:
        summary_file.write_text(text)
    with whole_file(paths.curves) as curves_file:
        draw_curves(history).savefig(curves_file, format="png")
    return paths


def report_table(title: str, results: Mapping[str, Any], paths: Mapping[str, Path]) -> Table:
    """Return the table that ends a run: the `results` by name, then the paths of what was written."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in results.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    if results and paths:
        table.add_section()
    for name, path in paths.items():
        table.add_row(name, str(path))
    return table
