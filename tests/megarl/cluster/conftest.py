"""Engines that echo, and die where a script says so."""

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from echo_engine import SCRIPT
from echo_kind import ECHO

import megarl.rollout
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, engine_role
from megarl.refit.refit import Refit
from megarl.resharding.transfer_stats import TransferStats
from megarl.schema import ClusterConfig, RolloutConfig


class OnThePath:
    """A path of the weights to engines that need none."""

    is_direct = True
    description = "nothing moves"

    def set_engines(self, engines):
        pass

    def send(self, version):
        return TransferStats(1)

    def recover(self, failure):
        raise failure

    def next_path(self, version):
        return self


@pytest.fixture
def script(tmp_path, monkeypatch):
    """`script("start", "start")`: engines die twice when they start."""
    folder = tmp_path / "script"
    folder.mkdir()
    monkeypatch.setitem(megarl.rollout.ENGINES, "echo", ECHO)
    monkeypatch.setitem(ECHO.loopback_environment, SCRIPT, str(folder))

    def write(*moments, suffix=".death"):
        for number, moment in enumerate(moments):
            (folder / f"{moment}.{number}{suffix}").touch()

    yield write
    for left in folder.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(left.stem), signal.SIGKILL)
        left.unlink()
    assert not list(folder.iterdir()), "a death that nobody died"


@pytest.fixture
def short_waits(monkeypatch):
    """Engines that do not come back are soon started once more."""
    monkeypatch.setattr("megarl.cluster.engines.restarts._WAITS_S", (0.1,) * 7)


@pytest.fixture
def open_group(tmp_path):
    @contextmanager
    def make(
        replicas,
        restarts,
        gpus=lambda _engines: None,
        make_path=lambda _engines: OnThePath(),
        refit_timeout_s=60,
        nodes=1,
        **cluster,
    ):
        """Engines over several `nodes` have a place for each on this one."""
        limits = ClusterConfig(**cluster)
        places = RolloutConfig(engine="echo", replicas=replicas * nodes)
        config = RolloutConfig(engine="echo", replicas=replicas, engine_args={"nodes": nodes})
        with (
            reserve([engine_role(ClusterConfig(), places)], limits) as seats,
            EngineGroup(config, seats[ENGINE], tmp_path, restarts, limits.engine_start_timeout_s) as engines,
        ):
            engines.wait_started(engines.begin_start(Path("model"), load_weights=False))
            path = make_path(engines)
            refit = Refit(None, engines, path, ["weight"], timeout_s=refit_timeout_s, gpus=gpus(engines))
            engines.recover_with(refit.catch_up)
            yield engines, refit

    return make
