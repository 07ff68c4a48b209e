import io
import re
import threading

import pytest

from megarl.process.phase import phase


class Watched(io.StringIO):
    """A stream that says when so many dots are written."""

    def __init__(self, dots: int) -> None:
        super().__init__()
        self.dots, self.seen = dots, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count(".") >= self.dots:
            self.seen.set()
        return written


def test_it_says_what_is_done_and_that_it_goes_on_and_how_long_it_took():
    stream = Watched(dots=3)
    with phase("starting the engines", stream, dot_every_s=0.01):
        assert stream.getvalue().startswith("starting the engines ")
        assert stream.seen.wait(60)
    assert re.fullmatch(r"starting the engines \.{3,} \d+ s\n", stream.getvalue())
    assert "phase" not in [thread.name for thread in threading.enumerate()]


def test_after_an_error_the_line_ends():
    stream = io.StringIO()
    with pytest.raises(ValueError, match="bad"), phase("reading", stream):
        raise ValueError("bad")
    assert stream.getvalue() == "reading \n"
