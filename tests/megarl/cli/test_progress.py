import io
import re
import threading
import time

import pytest
from rich.console import Console

from converters.errors import UserError
from megarl.cli.progress import ByteProgress
from megarl.planning.amounts import read_bytes, say_bytes, say_seconds


def lines_of(steps: list[tuple[float, int]], total: int, *, quiet: bool = False) -> list[str]:
    """Lines written of a run that has done so many bytes at such times."""
    stream, now = io.StringIO(), 0.0
    with ByteProgress(quiet=quiet, console=Console(file=stream, width=200), clock=lambda: now) as progress:
        for now, done in steps:  # noqa: B007 (the clock reads it)
            progress(done, total)
    return stream.getvalue().splitlines()


def test_a_line_comes_with_every_tenth() -> None:
    lines = lines_of([(second / 10, second * 10**6) for second in range(101)], 100 * 10**6)
    assert len(lines) == 10
    assert lines[4] == "50.0 MB of 100 MB, 50 %, 10.0 MB/s, 5.00 s left"


def test_a_line_comes_every_ten_seconds() -> None:
    lines = lines_of([(float(second), second) for second in range(1, 61)], 10**6)
    assert len(lines) == 6
    assert lines[0] == "10 bytes of 1.00 MB, 0 %, 1 bytes/s, 277 h 46 min left"


def test_a_short_run_writes_few_lines() -> None:
    assert len(lines_of([(each / 100, each) for each in range(151)], 150)) == 1


def test_more_than_all_is_all_and_nothing_is_nothing() -> None:
    assert lines_of([(0.1, 0), (1.1, 120)], 100) == ["100 bytes of 100 bytes, 100 %, 100 bytes/s, 0.00 s left"]
    assert lines_of([(2.0, 0)], 0) == ["0 bytes of 0 bytes, 100 %"]
    assert lines_of([(1.0, 50), (30.0, 100)], 100, quiet=True) == []


def test_a_terminal_gets_a_bar_that_is_drawn_now_and_then() -> None:
    stream, now = io.StringIO(), 0.0
    console = Console(file=stream, force_terminal=True, width=120)
    with ByteProgress(quiet=False, console=console, clock=lambda: now) as progress:

        def add() -> None:
            for _ in range(500):
                progress(50 * 10**6, 10**8)

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.3)  # in which rich draws whatever it was told
        assert "50.0" not in stream.getvalue()
        now = 1.0
        progress(75 * 10**6, 10**8)
        progress(10**8, 10**8)
    assert "100.0/100.0 MB" in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("500 MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("1.5kb", 1500),
        ("4096", 4096),
        ("7B", 7),
        ("1_000", 1000),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert read_bytes(text, "--size") == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "0", "5 GB/s", "1e9", "5XB", "\u0665GB", "_GB", "1__0", "5_", "9" * 400]
)
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match=r"--size .*is no size; write it as"):
        read_bytes(text, "--size")


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1200, "1.20 kB"),
        (28.44e6, "28.4 MB"),
        (284e9, "284 GB"),
        (1.4e12, "1.40 TB"),
    ],
)
def test_sizes_are_said_in_three_digits(nbytes: float, said: str) -> None:
    assert say_bytes(nbytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.123, "0.12 s"), (12.4, "12 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")]
)
def test_times_are_said(seconds: float, said: str) -> None:
    assert say_seconds(seconds) == said
