"""The page of the layouts that were run: a figure for each layout and kind of model, and read back into them."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from combinations import KINDS, PROCESSES, layouts

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "parallel_layouts_cpu.md"
TOLERANCE = 1e-5
_NONE, _NOT_RUN = "", "not run"
_NUMBER = re.compile(r"\d+e-?\d+")


class Cell(NamedTuple):
    """A place in the table."""

    layout: str
    kind: str


Figures = Mapping[Cell, float]


def all_cells() -> Iterator[Cell]:
    """Every layout of every kind of model."""
    return (Cell(str(layout), name) for name, kind in KINDS.items() for layout in layouts(kind))


def read(text: str) -> dict[Cell, float]:
    """The figures of a page, by the columns that its tables have."""
    found: dict[Cell, float] = {}
    columns: list[str] = []
    for line in text.splitlines():
        row, *values = [each.strip() for each in line.strip("|").split("|")]
        if row == "layout":
            columns = values
        elif len(values) == len(columns):
            found |= {
                Cell(row, kind): float(x) for kind, x in zip(columns, values, strict=True) if _NUMBER.fullmatch(x)
            }
    return found


def render(introduction: str, figures: Figures) -> str:
    """A page of an introduction and the figures."""
    has = set(all_cells())
    counts = {kind: sum(cell.kind == kind for cell in has) for kind in KINDS}
    lines = [introduction, "## All layouts", ""]
    shares = (f"{kind} {sum(cell.kind == kind for cell in figures)} of {count}" for kind, count in counts.items())
    lines += [f"{len(figures):,} of {len(has):,} layouts were run: {'; '.join(shares)}."]
    for processes in range(1, PROCESSES + 1):
        rows = dict.fromkeys(
            str(each) for kind in KINDS.values() for each in layouts(kind) if each.sizes.world_size == processes
        )
        title = f"### {processes} process{'es' if processes > 1 else ''}"
        lines += ["", title, "", f"| layout | {' | '.join(KINDS)} |", "|---|" + "---:|" * len(KINDS)]
        for row in rows:
            values = [_shown(Cell(row, kind), has, figures) for kind in KINDS]
            lines.append(f"| {row} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def introduction_of(text: str) -> str:
    """The part of a page that people write."""
    return text.partition("## All layouts")[0].rstrip() + "\n"


def update(figures: Figures) -> None:
    """Put figures into the page, beside those that it has of other layouts."""
    text = PAGE.read_text()
    PAGE.write_text(render(introduction_of(text), {**read(text), **figures}))


def _shown(cell: Cell, has: set[Cell], figures: Figures) -> str:
    if cell not in has:
        return _NONE
    return _rounded_up(figures[cell]) if cell in figures else _NOT_RUN


def _rounded_up(value: float) -> str:
    """To one digit, such as 2e-6; a difference of nothing is 1e-9."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no difference")
    exponent = math.floor(math.log10(max(value, 1e-9)))
    digit = math.ceil(max(value, 1e-9) / 10**exponent - 1e-9)
    return f"{digit}e{exponent}" if digit < 10 else f"1e{exponent + 1}"
