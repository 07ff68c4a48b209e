"""Writes rows of a data set to parquet."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from converters.durable import complete


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` to `path` atomically."""
    partial = path.with_name(f"{path.name}.partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    complete(partial, path)
