from concurrent.futures import ThreadPoolExecutor

import pytest
from transfer_ranks import start_fork_server
from transfer_stages import Stage


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    start_fork_server()


@pytest.fixture
def set_up():
    """Starts the processes of a scene; they end with the test."""
    stages = []
    with ThreadPoolExecutor(64) as pool:
        try:
            yield lambda scene: stages.append(Stage(scene, pool)) or stages[-1]
        finally:
            for stage in stages:
                stage.end()
