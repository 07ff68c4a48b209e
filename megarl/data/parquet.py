"""Rows of parquet files, with errors that name the file, the column and the row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from converters.errors import UserError

_ROWS_PER_BATCH = 64
"""Small: Arrow cannot read a batch with over 2 GiB of text in a struct, and the tests of one row may take megabytes."""
_SILENTLY_MISSED = {
    **dict.fromkeys(("images", "videos", "audios"), "models learn from text alone here"),
    "tools": "no chat template is told of it here: write the tools into a system message, as the template does",
}
"""Columns that verl and TRL pass to the model in addition to the messages -> why they are not supported here."""
_NOTHING: tuple[Any, ...] = (None, "", "[]", [], {})
_OTHERS = {
    b"{": "is no parquet file; docs/data.md has lines that make one of jsonl",
    b"version https://git-lfs": "is a pointer of Git LFS: `git lfs pull` in its folder brings the file itself",
}
"""First bytes of a file that is not parquet -> what it is."""


def read_rows(
    file: str | Path, needed: Sequence[str], optional: Sequence[str] = (), named_by: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 0, {column: value}) of one parquet file; missing optional columns are left out.

    `named_by` maps a column whose name is configurable to its configuration key, for messages. Raises `UserError` for a
    file that is missing, unreadable, not parquet, without rows, or without a needed column, for a value that Python
    cannot hold, and for a row with images or tools.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"data file {path} does not exist; check data.train_files and the other lists of files")
    try:
        with pq.ParquetFile(path) as parquet:
            columns = _columns(path, parquet, needed, optional, named_by or {})
            missed = [name for name in _SILENTLY_MISSED if name in parquet.schema_arrow.names and name not in columns]
            row = 0
            for batch in parquet.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[*columns, *missed]):
                for values in _values(batch, path, row):
                    for name in missed:
                        _check_missed(name, values.pop(name), f"row {row} (from 0) of {path}")
                    yield row, values
                    row += 1
    except (pa.ArrowException, OSError) as error:
        unreadable = f"cannot be read as parquet ({error}); write it again, as pandas.DataFrame.to_parquet does"
        raise UserError(f"data file {path} {_what_else_it_is(path) or unreadable}") from error


def _check_missed(column: str, value: Any, where: str) -> None:
    if value not in _NOTHING:
        raise UserError(
            f"{where} has something in column {column!r}, and {_SILENTLY_MISSED[column]}; take the rows that need it"
            " out, and the column, too"
        )


def _values(batch: pa.RecordBatch, path: Path, first: int) -> list[dict[str, Any]]:
    """The rows of a batch; `first` is the number of its first row in the file."""
    try:
        return cast("list[dict[str, Any]]", batch.to_pylist())
    except (ValueError, OverflowError) as error:  # text that is no UTF-8, times that datetime cannot hold
        raise UserError(
            f"rows {first} to {first + len(batch) - 1} (from 0) of {path} hold a value that Python cannot ({error});"
            " write it as a text, or leave it out"
        ) from error


def _what_else_it_is(path: Path) -> str:
    """End of a sentence about a file of a known other format; "" if the format is not known."""
    try:
        with path.open("rb") as file:
            begin = file.read(100).lstrip()
    except OSError:
        return ""
    return next((said for first, said in _OTHERS.items() if begin.startswith(first)), "")


def _columns(
    path: Path, parquet: pq.ParquetFile, needed: Sequence[str], optional: Sequence[str], named_by: Mapping[str, str]
) -> list[str]:
    existing = parquet.schema_arrow.names
    absent = [column for column in needed if column not in existing]
    if absent:
        keys = [named_by[column] for column in absent if column in named_by]
        right = "right one" if len(keys) == 1 else "right ones"
        settings = f", or name the {right} in {' and '.join(keys)}" if keys else ""
        renamed = "rename one of them" if len(absent) == 1 else "rename its columns"
        raise UserError(
            f"data file {path} has no column{'s' * (len(absent) > 1)} {' and '.join(map(repr, absent))}; its columns"
            f" are {', '.join(map(repr, existing)) or 'none'}: {renamed}{settings}; docs/data.md says what each"
            " holds"
        )
    if parquet.metadata.num_rows == 0:
        raise UserError(f"data file {path} has no rows; write at least one or take it off the list of files")
    return [*needed, *(column for column in optional if column in existing)]
