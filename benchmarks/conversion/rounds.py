"""Runs programs in turn, A B C A B C ..., each from the same state of disk and page cache."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conversion.observe import Observation, observe
from conversion.programs import Form, Phase, Program, folder_bytes

_PIECE_BYTES = 16 << 20
_IDLE_S = 5.0


@dataclass(frozen=True)
class Run:
    """One run of a program."""

    program: str
    round: int
    phases: Sequence[Phase]
    read_bytes: int
    written_bytes: int
    observation: Observation


def run_rounds(
    programs: Sequence[Program],
    sources: Mapping[Form, Path],
    rounds: int,
    folder: Path,
    report: Callable[[Run], None],
) -> Iterator[Run]:
    """Run every program once per round, starting with another one each time; each run's output folder is deleted."""
    for round_number in range(rounds):
        first = round_number % len(programs)
        for program in (*programs[first:], *programs[:first]):
            run = run_once(program, round_number, sources[program.form], folder / "out")
            report(run)
            yield run


def run_once(program: Program, round_number: int, source: Path, out: Path) -> Run:
    """Run a program once; its output folder `out` is deleted afterwards. The source is in the page cache.

    The run starts when earlier writes are on the disk, and some seconds after the last run's files were deleted. By
    then a virtual machine has returned their memory to its host; getting it again would otherwise cost time only in
    some runs, depending on how soon a command writes.
    """
    os.sync()
    read_through(source)
    time.sleep(_IDLE_S)
    seen = observe(program.command(source, out), program.environment)
    run = Run(program.name, round_number, program.phases(seen), folder_bytes(source), folder_bytes(out), seen)
    shutil.rmtree(out)
    return run


def read_through(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
