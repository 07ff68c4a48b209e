"""metrics.jsonl: one JSON object per step."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.errors import UserError
from megarl.tracking.histogram import Histogram, MetricValue
from megarl.tracking.tracker import Run

FILE_NAME = "metrics.jsonl"


class JsonLinesLogger:
    """Appends {"step": ..., name: value, ...} to metrics.jsonl and flushes it.

    A resumed run first removes the lines from its first step on, and a line left incomplete by a kill, so that the file
    ends up like an uninterrupted run's. Values that are not finite are written as null, a histogram as {"edges": [...],
    "counts": [...]}, and one of numbered things, such as experts, as {"counts": [...]}.
    """

    def __init__(self, run: Run) -> None:
        path = run.place(FILE_NAME)
        if path.exists():
            os.truncate(path, _length_before(path, run.first_step))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Write one line."""
        values = {name: _as_json(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        """Sync the file to disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_history(output_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of `output_dir`/metrics.jsonl. Raises `UserError` for a line that is not a JSON object.

    An incomplete last line, being written or left by a kill, is skipped.
    """
    return list(each_step(output_dir))


def each_step(output_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of `read_history` one by one: a long run may have gigabytes."""
    path = output_dir / FILE_NAME
    return (_parse(path, number, line) for number, line in _whole_lines(path))


def _as_json(value: MetricValue) -> Mapping[str, Sequence[float]] | float | None:
    if isinstance(value, Histogram):
        if value.is_numbered:
            return {"counts": value.counts}
        return {"edges": list(value.edges), "counts": list(value.counts)}
    return value if math.isfinite(value) else None


def _length_before(path: Path, first_step: int) -> int:
    """Return the length in bytes of the complete lines before the first one of `first_step` or later."""
    length = 0
    for number, line in _whole_lines(path):
        if _parse(path, number, line)["step"] >= first_step:
            break
        length += len(line)
    return length


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each complete line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise UserError(f"line {number} of {path} is not a JSON object with a 'step'; repair or remove the file")
    return values
