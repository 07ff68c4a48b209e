"""Files of an output: written anywhere by several threads, a few of them open at a time, and all on disk in the end."""

import errno
import os
import resource
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from converters.stream.files import OutputFiles

THREADS = 4
PIECE_BYTES = 1000
CONTENT = os.urandom(1_000_000)


@pytest.fixture(autouse=True)
def _early_write_back(monkeypatch):
    monkeypatch.setattr("converters.stream.files._WRITE_BACK_BYTES", 5 * PIECE_BYTES)


@pytest.fixture
def unsynced(monkeypatch):
    """Files with bytes that no fsync waited for, by number of writes; closing one of them is an error."""
    writes: Counter[int] = Counter()
    pwrite, fsync, close = os.pwrite, os.fsync, os.close

    def counted_pwrite(descriptor, content, offset):
        writes[os.fstat(descriptor).st_ino] += 1
        return pwrite(descriptor, content, offset)

    def counted_fsync(descriptor):
        fsync(descriptor)
        writes.pop(os.fstat(descriptor).st_ino, None)

    def checked_close(descriptor):
        assert os.fstat(descriptor).st_ino not in writes
        close(descriptor)

    for name, function in (("pwrite", counted_pwrite), ("fsync", counted_fsync), ("close", checked_close)):
        monkeypatch.setattr(os, name, function)
    return writes


class Opened:
    """Counts the files that are open."""

    def __init__(self, monkeypatch) -> None:
        self.names: dict[int, str] = {}
        self.most, self._lock = 0, threading.Lock()
        self._open, self._close = os.open, os.close
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "close", self.close)

    def open(self, path, *arguments) -> int:
        with self._lock:
            descriptor = self._open(path, *arguments)
            self.names[descriptor] = Path(path).name
            self.most = max(self.most, len(self.names))
            return descriptor

    def close(self, descriptor) -> None:
        with self._lock:
            self.names.pop(descriptor)
            self._close(descriptor)


@pytest.fixture
def opened(monkeypatch):
    return Opened(monkeypatch)


def write_all(files: OutputFiles, thread: int, number: int) -> None:
    """Every fourth piece, to the same place of one of so many files."""
    for piece in range(thread, len(CONTENT) // PIECE_BYTES, THREADS):
        start = piece * PIECE_BYTES
        files.write(f"a/b/{piece % number}", memoryview(CONTENT)[start : start + PIECE_BYTES], start)


@pytest.mark.parametrize(("number", "most_open"), [(1, 64), (40, 64), (40, 7), (40, 1)])
def test_files_are_written_anywhere_by_several_threads(number, most_open, opened, tmp_path):
    with OutputFiles(tmp_path, most_open=most_open) as files, ThreadPoolExecutor(THREADS) as pool:
        done = [pool.submit(write_all, files, thread, number) for thread in range(THREADS)]
        for each in done:
            each.result()
        files.sync()
    contents = [(tmp_path / "a/b" / str(each)).read_bytes() for each in range(number)]
    for piece in range(len(CONTENT) // PIECE_BYTES):
        part = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
        assert contents[piece % number][part] == CONTENT[part]
    assert not opened.names
    # A thread may have one that it writes to, and a few that it closes.
    assert opened.most <= min(number, most_open + 5 * THREADS)


def test_a_file_is_on_disk_before_it_is_closed_and_all_are_in_the_end(unsynced, tmp_path):
    with OutputFiles(tmp_path, most_open=3) as files:
        for _ in range(2):  # the first ones are opened again
            write_all(files, 0, 10)
        assert unsynced
        files.sync()
        assert not unsynced


def test_the_last_ones_stay_open(opened, tmp_path):
    with OutputFiles(tmp_path, most_open=2) as files:
        for name in ("a", "b", "a", "c"):
            files.write(name, memoryview(b"text"), 0)
        assert sorted(opened.names.values()) == ["a", "c"]


def test_a_part_of_what_a_process_may_have_open_is(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 100))
    with OutputFiles(tmp_path) as files:
        for name in range(9):
            files.write(str(name), memoryview(b"text"), 0)
        assert sorted(opened.names.values()) == ["6", "7", "8"]


def test_an_error_that_comes_late_ends_the_writing(opened, tmp_path, monkeypatch):
    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with OutputFiles(tmp_path, most_open=1) as files:
        files.write("a", memoryview(b"text"), 0)
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            files.write("b", memoryview(b"text"), 0)
    assert not opened.names
