import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.errors import UserError
from megarl.data.parquet import read_rows


def test_rows_come_in_order_with_the_wanted_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(3000), "y": ["text"] * 3000, "z": [0] * 3000}), path)
    rows = list(read_rows(path, ["x"], ["y", "absent"]))
    assert rows == [(number, {"x": number, "y": "text"}) for number in range(3000)]


def test_rows_of_32_mb_are_read_though_arrow_takes_2_gib_at_once(tmp_path, monkeypatch):
    path, sizes, read = tmp_path / "a.parquet", [], pq.ParquetFile.iter_batches
    pq.write_table(pa.table({"x": range(1000)}), path)
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *a, **k: (sizes.append(b.num_rows) or b for b in read(*a, **k))
    )
    assert len(list(read_rows(path, ["x"]))) == sum(sizes) == 1000
    assert max(sizes) * 32 * 2**20 <= 2**31


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.parquet does not exist"):
        list(read_rows(tmp_path / "nowhere.parquet", ["x"]))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r" cannot be read as parquet \(.*\); write it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:9f\n",
            r" is a pointer of Git LFS: `git lfs pull` in ",
        ),
        (b'{"x": 1}\n', r" is no parquet file; docs/data\.md has lines that make one of jsonl$"),
        (b"PAR1 not really PAR1", r" cannot be read as parquet \(.*\); write it again"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, content, says):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.parquet{says}"):
        list(read_rows(path, ["x"]))


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [f"value {number}" for number in range(1000)]}), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read as parquet"):
        list(read_rows(path, ["x"]))


def test_an_absent_column_is_named_beside_those_that_exist(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["1"], "answer": ["2"]}), path)
    with pytest.raises(
        UserError, match=r"no column 'prompt'; its columns are 'question', 'answer': rename one of them; docs/data"
    ):
        list(read_rows(path, ["prompt", "answer"]))
    with pytest.raises(
        UserError,
        match=r"no columns 'prompt' and 'right'; its columns are 'question', 'answer': rename its columns, or name the"
        r" right ones in data\.prompt_column and data\.right; docs/data\.md says what each holds$",
    ):
        list(read_rows(path, ["prompt", "right"], named_by={"prompt": "data.prompt_column", "right": "data.right"}))


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), path)
    with pytest.raises(UserError, match=r"a\.parquet has no rows"):
        list(read_rows(path, ["x"]))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (pa.array([10**14], pa.timestamp("s")), "days=1157407407"),
        (
            pa.Array.from_buffers(
                pa.string(), 1, [None, *map(pa.py_buffer, [bytes([0] * 4 + [1] + [0] * 3), b"\xff"])]
            ),
            "utf-8",
        ),
    ],
)
def test_a_value_that_python_cannot_hold_is_refused_with_its_rows(tmp_path, value, says):
    path = tmp_path / "a.parquet"
    good = pa.array([None] * 70, value.type)
    pq.write_table(pa.table({"x": pa.chunked_array([good, value])}), path)
    with pytest.raises(
        UserError, match=rf"^rows 64 to 70 \(from 0\) of .*a\.parquet hold a value .*{says}.* as a text"
    ):
        list(read_rows(path, ["x"]))


@pytest.mark.parametrize(
    ("column", "value", "empty"),
    [
        ("images", [{"bytes": b"\x89PNG", "path": None}], []),  # as verl's geo3k has them
        ("tools", '[{"type": "function"}]', "[]"),
        ("tools", [{"type": "function"}], None),
    ],
)
def test_what_a_model_would_be_shown_elsewhere_is_not_left_out_silently(tmp_path, column, value, empty):
    path = tmp_path / "a.parquet"
    rows = [{"x": 1, column: value}, {"x": 2, column: empty}]
    pq.write_table(pa.Table.from_pylist(rows).slice(1), path)
    assert list(read_rows(path, ["x"])) == [(0, {"x": 2})]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), path)
    with pytest.raises(UserError, match=rf"^row 1 \(from 0\) of .*a\.parquet has something in column '{column}', and "):
        list(read_rows(path, ["x"]))
    assert [values for _, values in read_rows(path, [column])] == [{column: empty}, {column: value}]


def test_the_lines_of_the_docs_make_parquet_of_jsonl_without_losing_a_column(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "jsonl" in block)
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('\ufeff{"x": 1}\r\n\r\n{"x": 2, "y": {"z": 3}}\n', encoding="utf-8", newline="")
    exec(lines, {})
    rows = [values for _, values in read_rows("train.parquet", ["x"], ["y"])]
    assert rows == [{"x": 1, "y": None}, {"x": 2, "y": {"z": 3}}]
