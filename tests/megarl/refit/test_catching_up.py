"""An engine that comes back gets the weights that the others serve, or, where the ranks have newer ones, none yet."""

from contextlib import nullcontext

import pytest

from megarl.refit.refit import Refit
from megarl.resharding.transfer_stats import TransferStats


class OneEngine:
    """An engine that is up, and what it has been told to serve."""

    def __init__(self):
        self.version = -1

    def __len__(self):
        return 1

    def with_version(self, version):
        return self if self.version == version else ()

    def without_version(self, version):
        return () if self.version == version else self

    def undisturbed(self):
        return nullcontext()

    def begin_update(self, version, names, timeout_s):
        pass

    def commit_update(self, version, timeout_s, kv):
        self.version = version
        return 0


class Noting:
    """A path: what the ranks had at each send."""

    is_direct = True

    def __init__(self, ranks):
        self.ranks, self.sent = ranks, []

    def set_engines(self, engines):
        pass

    def next_path(self, version):
        return self

    def send(self, version):
        self.sent.append((version, self.ranks["step"]))
        return TransferStats()


@pytest.mark.parametrize("dies_in", ["the rollout", "the update"])
def test_no_engine_serves_weights_of_another_version_than_it_says(dies_in) -> None:
    ranks, engine = {"step": 0}, OneEngine()
    path = Noting(ranks)
    refit = Refit(None, engine, path, [], timeout_s=1.0)
    refit(0)
    if dies_in == "the rollout":
        engine.version = -1
        refit.catch_up()
        assert engine.version == 0
    refit.mark_outdated()
    ranks["step"] = 1
    if dies_in == "the update":
        engine.version = -1
        refit.catch_up()
        assert engine.version == -1
    refit(1)
    engine.version = -1
    refit.catch_up()
    assert engine.version == 1
    assert all(version == held for version, held in path.sent)
