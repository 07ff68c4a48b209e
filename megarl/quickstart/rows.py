"""Writes rows of a data set to parquet."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from converters.durable import whole_file


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` to `path` atomically."""
    with whole_file(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)
