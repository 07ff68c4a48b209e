"""Writes many tensors with several threads, each one tensor at a time; resumes an interrupted run."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from converters.stream.files import OutputFiles
from converters.stream.journal import Journal, is_intact
from converters.stream.sources import Source
from converters.stream.targets import Target, Written
from converters.stream.tensor_writer import TensorWriter, places_of

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, from several threads."""
_POLL_S = 0.5


class _CancelledError(Exception):
    """Another thread failed, or the user interrupted."""


class _Run:
    def __init__(self, targets: Sequence[Target], progress: Progress) -> None:
        self._left: dict[str, deque[Target]] = defaultdict(deque)
        for target in targets:
            self._left[target.place.file].append(target)
        self._busy: Counter[str] = Counter()
        self._total = sum(map(_nbytes, targets))
        self._done, self._progress = 0, progress
        self._lock = threading.Lock()
        self.cancelled = threading.Event()
        self.written: dict[str, list[Written]] = {}

    def next_target(self, last: Target | None) -> Target | None:
        """The next target of the same file as the thread's `last`, or else of the file that the fewest threads write.

        Threads that write the same file wait for each other.
        """
        with self._lock:
            file = last.place.file if last else None
            if file not in self._left:
                if file is not None:
                    self._busy[file] -= 1
                if not self._left:
                    return None
                file = min(self._left, key=self._busy.__getitem__)
                self._busy[file] += 1
            targets = self._left[file]
            target = targets.popleft()
            if not targets:
                del self._left[file]
            return target

    def count(self, nbytes: int) -> None:
        if self.cancelled.is_set():
            raise _CancelledError
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)

    def finish(self, target: Target, written: list[Written], journal: Journal | None) -> None:
        with self._lock:
            self.written[target.name] = written
            if journal:
                journal.add(target.name, written)


def write_targets(
    targets: Sequence[Target], source: Source, folder: Path, journal: Journal, *, workers: int, progress: Progress
) -> dict[str, list[Written]]:
    """Write the targets to files below `folder`; return the places of each one's elements, with checksums.

    Tensors in the journal of an earlier run are verified instead of written, and written again if they are damaged. All
    bytes are on disk on return. An exception in a thread, and Ctrl-C, stop all threads.
    """
    run = _Run(targets, progress)

    def work(files: OutputFiles) -> None:
        writer = TensorWriter(source, files, run.count)
        target = None
        while (target := run.next_target(target)) is not None:
            found = journal.found.get(target.name, [])
            places = [(each.file, each.offset, each.nbytes) for each in found]
            if places == places_of(target) and all(is_intact(folder, each) for each in found):
                # The frame's checksum is not recorded: after a crash of the machine, the frame may be lost and the
                # elements not.
                writer.write_frame(target, found[0].crc32)
                run.finish(target, found, None)
                run.count(_nbytes(target))
            else:
                run.finish(target, writer.write(target), journal)

    with OutputFiles(folder) as files, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, files) for _ in range(workers)]
        try:
            _wait(futures)
        finally:
            run.cancelled.set()
        for future in futures:
            future.result()
        files.sync()
    return run.written


def _nbytes(target: Target) -> int:
    """Size of the target's elements and scales."""
    return sum(nbytes for _, _, nbytes in places_of(target))


def _wait(futures: Sequence[Future[None]]) -> None:
    """Return when all are done, or raise the exception of the first to fail. Wakes up regularly to handle Ctrl-C."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
