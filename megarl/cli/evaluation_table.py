"""The metrics of an evaluation as lines of text."""

import re
from collections.abc import Mapping

_NAME = re.compile(r"(?:source/(?P<source>.+)/)?(?P<estimate>pass|majority|best|accuracy)(?:_at_(?P<k>\d+))?")
_OVERALL = "all"


def evaluation_table(metrics: Mapping[str, float]) -> list[str]:
    """A line per data source and estimate, a column per k, the accuracy in the first; empty for an accuracy alone.

    `metrics` are those of `megarl.stages.evaluate` without the prefix "eval/".
    """
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for name, value in metrics.items():
        if match := _NAME.fullmatch(name):
            row = (match["source"] or _OVERALL, f"{match['estimate']}@k" if match["k"] else match["estimate"])
            cells.setdefault(row, {})[int(match["k"] or 1)] = value
    if len(cells) < 2:
        return []
    columns = sorted({k for values in cells.values() for k in values})
    sources = list(dict.fromkeys(source for source, _ in cells))
    rows = [["data source", "", *(f"k={k}" for k in columns)]] if len(columns) > 1 else []
    rows += [
        [source, estimate, *(f"{values[k]:.4f}" if k in values else "" for k in columns)]
        for (source, estimate), values in sorted(cells.items(), key=lambda item: sources.index(item[0][0]))
    ]
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
