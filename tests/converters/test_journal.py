"""Notes of an interrupted run are believed where they are whole, of the same purpose, and true of the bytes."""

import json

import pytest
from isal.isal_zlib import crc32

from converters.stream.journal import Journal, is_intact
from converters.stream.targets import Written

PURPOSE = {"from": [("config.json", 10, 20)], "dtype": "keep"}
ENTRIES = {
    "a": [Written("one", 0, 10, 123)],
    "b@0,1": [Written("release/__0_0.distcp", 10, 5, 7), Written("two", 0, 4, 9)],
    "name with \n and \u2028 and ü": [Written("one", 10, 0, 0)],
}


def note(path, entries=ENTRIES, purpose=PURPOSE) -> None:
    with Journal(path, purpose) as journal:
        for name, written in entries.items():
            journal.add(name, written)


def found(path, purpose=PURPOSE) -> dict[str, list[Written]]:
    with Journal(path, purpose) as journal:
        return journal.found


def test_what_was_noted_is_found(tmp_path):
    path = tmp_path / "journal"
    note(path)
    assert found(path) == ENTRIES
    note(path, {"c": [Written("one", 20, 1, 1)]})
    assert found(path) == {**ENTRIES, "c": [Written("one", 20, 1, 1)]}


def test_lines_are_in_the_file_at_once(tmp_path):
    with Journal(tmp_path / "journal", PURPOSE) as journal:
        journal.add("a", ENTRIES["a"])
        assert len((tmp_path / "journal").read_text().splitlines()) == 2


@pytest.mark.parametrize("other", [{}, {**PURPOSE, "dtype": "bf16"}, {**PURPOSE, "from": [("config.json", 10, 21)]}])
def test_a_journal_of_another_purpose_is_begun_anew(other, tmp_path):
    path = tmp_path / "journal"
    note(path)
    assert not Journal(path, other).is_begun
    assert found(path, other) == {}
    assert path.read_text() == json.dumps(other, sort_keys=True) + "\n"
    assert found(path) == {}


def test_at_any_length_what_is_whole_is_found_and_can_be_added_to(tmp_path):
    path = tmp_path / "journal"
    note(path)
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = sum(length >= sum(map(len, lines[: n + 1])) for n in range(1, len(lines)))
        assert found(path) == dict(list(ENTRIES.items())[:whole]), length
        note(path, {"c": [Written("one", 20, 1, 1)]})
        assert list(found(path)) == [*list(ENTRIES)[:whole], "c"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n",
        b"{}\n",
        b"7\n",
        b"[]\n",
        b"[7]\n",
        b'["a", ["one", 0, 10]]\n',
        b'["a", 7]\n',
        b'["a", ["one", 0, 10, 1, 1]]\n',
        b'["a", ["one", 0,\n',
        b"\n",
        b"\0" * 20 + b"\n",
    ],
)
def test_a_damaged_line_ends_what_is_believed(line, tmp_path):
    path = tmp_path / "journal"
    note(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + line + b"".join(lines[2:]))
    assert list(found(path)) == ["a"]
    assert path.read_bytes() == lines[0] + lines[1]


def test_bytes_are_intact_or_not(tmp_path):
    content = bytes(range(200)) * 10_000  # more than is read at once
    (tmp_path / "file").write_bytes(content)
    assert is_intact(tmp_path, Written("file", 3, 1_500_000, crc32(content[3:1_500_003])))
    assert is_intact(tmp_path, Written("file", 2_000_000, 0, 0))
    assert not is_intact(tmp_path, Written("file", 4, 1_500_000, crc32(content[3:1_500_003])))
    assert not is_intact(tmp_path, Written("file", 1_999_999, 2, crc32(content[-1:])))
    assert not is_intact(tmp_path, Written("other", 0, 1, 0))
    with (tmp_path / "file").open("r+b") as file:
        file.seek(1_400_000)
        file.write(b"\xaa")
    assert not is_intact(tmp_path, Written("file", 3, 1_500_000, crc32(content[3:1_500_003])))
