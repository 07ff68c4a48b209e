"""Fixtures that all tests share."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples in every run, and no wall-time limits.
settings.register_profile("deterministic", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("deterministic")

# Ray would start a cluster by itself, on all interfaces and to the end of the process, where code asks of one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Nothing that tests import is garbage. Turned on again when all is imported.
gc.disable()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of a file to one process, and those of engines: they share some that take long to start."""
    for item in items:
        folder = item.path.parent
        item.add_marker(pytest.mark.xdist_group(str(folder if folder.name == "rollout" else item.path)))
