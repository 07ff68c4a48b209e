"""Hostile input: whatever a file or a command line holds, it is taken, or refused in one sentence, and that ends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.data.time_limit import cpu_time_limit
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

# In seconds of computing: what is endless fails, what is slow under load does not.
ENDLESS_S = 60.0


@pytest.fixture(scope="session")
def hostile_model(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hostile_files(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("data"), held_out=16)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """`refusal(function, *arguments)` gives the sentence by which a call is refused; None if it is taken."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)

    def call(function: Callable, *arguments) -> str | None:
        try:
            with cpu_time_limit(ENDLESS_S):
                function(*arguments)
        except UserError as error:
            sentence = str(error)
            assert sentence.strip()
            assert "Traceback" not in sentence
            return sentence
        return None

    yield call
    assert list(Path(working).iterdir()) == [], "something was written or executed"
