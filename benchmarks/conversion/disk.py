"""Speed of the disk itself: sequential writes from memory, until the bytes are on the disk.

python -m conversion.disk --bytes N --writers N --out DIR

The last line is JSON with the seconds.
"""

import argparse
import json
import os
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

_BUFFER_BYTES = 16 << 20
# Larger writes use larger pages in the page cache, which a virtual machine may first have to get from its host again,
# at a third of the speed.
_PIECE_BYTES = 128 << 10


def write(file: Path, size: int, barrier: Barrier) -> None:
    """Write `size` random bytes to `file` and sync, starting when all processes are at the barrier."""
    buffer = memoryview(os.urandom(_BUFFER_BYTES))
    barrier.wait()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    written = 0
    while written < size:
        start = written % _BUFFER_BYTES
        written += os.write(descriptor, buffer[start : start + min(_PIECE_BYTES, size - written)])
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    """Write and print the seconds; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, required=True, help="how much all writers write together")
    parser.add_argument("--writers", type=int, required=True, help="how many processes, each with a file of its own")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    options = parser.parse_args()
    options.out.mkdir()
    context = get_context("fork")
    barrier = context.Barrier(options.writers + 1)
    share = options.bytes // options.writers
    writers = [
        context.Process(target=write, args=(options.out / f"{number}", share, barrier))
        for number in range(options.writers)
    ]
    for writer in writers:
        writer.start()
    barrier.wait()
    start = time.perf_counter()
    for writer in writers:
        writer.join()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
