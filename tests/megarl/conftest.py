"""One Ray cluster for tests that follow each other and ask for it: to start and to end one takes seconds."""

import gc
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import ray
from whole_runs import kill_tree

from megarl.cluster.ray.runtime import ray_cluster
from megarl.rewards import Scorer
from megarl.schema import ClusterConfig, RewardConfig

_STACK = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STACK] = ExitStack()


@pytest.fixture
def shared_cluster(request: pytest.FixtureRequest) -> None:
    if not ray.is_initialized():
        request.config.stash[_STACK].enter_context(ray_cluster(ClusterConfig()))


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test started: they end with it, and so do their children."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        kill_tree(process.pid)
        process.wait()


@pytest.fixture
def folder_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a cluster's temporary files, without the cluster."""
    context = SimpleNamespace(get_temp_dir=lambda: "/tmp/elsewhere")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster before a test that does not ask for it: it may fork, or start one of its own."""
    if "shared_cluster" not in getattr(nextitem, "fixturenames", ()):
        item.config.stash[_STACK].close()


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """Leave all that only a search for garbage would find."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    """Scores a response that is a number with that number."""
    from sampling_job import NUMBER

    with Scorer(RewardConfig(function=NUMBER, workers=2)) as scorer:
        yield scorer
