"""Final output of the checkpoint commands, and the options that they share."""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from converters.durable import is_disk_full
from converters.errors import UserError
from converters.gc_pause import gc_paused

_MOST_WORKERS = 4
CONTINUES = "interrupted; the same command goes on where it was"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="no progress; the last line of the output is JSON")


def add_hf_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--hf-config`."""
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="folder with the config.json of a torch_dist checkpoint (default: the one it came with)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Declare `--workers`."""
    default = min(_MOST_WORKERS, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=default, metavar="N", help="threads (here: %(default)s)")


def check_workers(workers: int) -> None:
    """Raise UserError for less than one worker."""
    if workers < 1:
        raise UserError(f"--workers {workers} leaves nobody to do the work; give at least 1")


def check_folder(folder: Path, advice: str) -> None:
    """Raise UserError, with this advice, if there is no folder: before torch is imported, which takes seconds."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {advice}")


@contextmanager
def streaming() -> Iterator[None]:
    """Set the process up for threads that copy, and for hundreds of thousands of records that live to its end."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the workers are the threads
    try:
        # No record ever becomes garbage, and garbage collection would double the time of a plan.
        with gc_paused():
            yield
    finally:
        torch.set_num_threads(threads)


def print_outcome(options: argparse.Namespace, sentences: Iterable[str], facts: dict[str, Any]) -> None:
    """Print the sentences, or with `--json` the facts on one line."""
    if options.json:
        print(json.dumps({"command": options.command, **facts}))
    else:
        print("\n".join(sentences))


def table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of two aligned columns: names and values."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in rows]


@contextmanager
def file_errors_in_a_sentence() -> Iterator[None]:
    """Turn the error of an unreadable file into a UserError.

    Other exceptions exit with code 1, which for these commands is a result: the checkpoints differ, or one is damaged.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and is_disk_full(error):
            raise
        where = error.filename or "a file of the checkpoint"
        raise UserError(f"{where} cannot be read or written ({error.strerror or error}); change that") from error
