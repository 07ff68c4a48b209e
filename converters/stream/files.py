"""The files of an output folder, written at any place by several threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WRITE_BACK_BYTES = 2**23


class OutputFiles:
    """Files below `folder`, made when first written to. Use as a context manager: leaving it closes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._dirty: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(1)

    def __enter__(self) -> "OutputFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._background.shutdown(cancel_futures=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def write(self, file: str, content: memoryview, offset: int) -> None:
        """Write all of `content` at `offset`; the disk begins with it soon, not only when the file is synced."""
        descriptor = self._descriptor(file)
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], offset + done)
        self._start_write_back(file, descriptor, offset, len(content))

    def sync(self) -> None:
        """Return when everything is on disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                path = self._folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptors[file] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._dirty[file] = [0, 0, 0]
            return self._descriptors[file]

    def _start_write_back(self, file: str, descriptor: int, offset: int, nbytes: int) -> None:
        with self._lock:
            start, stop, dirty = self._dirty[file]
            start, stop, dirty = (min(start, offset) if dirty else offset), max(stop, offset + nbytes), dirty + nbytes
            self._dirty[file] = [start, stop, dirty] if dirty < _WRITE_BACK_BYTES else [0, 0, 0]
        if dirty >= _WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            # Linux starts to write the dirty pages of a range that is said not to be needed, and returns at once.
            self._background.submit(os.posix_fadvise, descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
