"""Fixtures that all tests share."""

import gc
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

# The same examples in every run, and no wall-time limits.
settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("deterministic")

# Ray would start a cluster by itself, on all interfaces and to the end of the process, where code asks of one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Nothing that tests import is garbage. Turned on again when all is imported.
gc.disable()

ENGINES = "tests/megarl/rollout"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, default=1, help="run one of so many long tests, or parallel layouts")
    parser.addoption("--offset", type=int, default=0, help="which of so many, from 0 on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests that are not in the sample: which it is in follows from a test's name alone.

    The tests of engines come first: they are most of what one process does, and others would wait for it at the end.
    """
    items.sort(key=lambda item: _scope(item.nodeid) != ENGINES)
    sample, offset = config.getoption("--sample"), config.getoption("--offset")
    if sample < 1:
        raise pytest.UsageError(f"--sample={sample}: one of so many, so at least 1")

    def is_left_out(item: pytest.Item) -> bool:
        return bool(item.get_closest_marker("long")) and (crc32(item.nodeid.encode()) - offset) % sample != 0

    if left_out := {item for item in items if is_left_out(item)}:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the tests import out of every search for garbage: megatron-core asks for one in each checkpoint.

    A search takes most of a second, and in the processes that tests fork it copies what it looks at.
    """
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    """Let all be freed at the end: Triton's bindings list on standard error what is left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Leave the tests of a file to one process, and those of engines: they share some that take long to start."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _scope(nodeid: str) -> str:
    """The tests that stay with one process: those of a file, or of the folder of engines."""
    file = nodeid.partition("::")[0]
    return ENGINES if str(PurePosixPath(file).parent) == ENGINES else file
