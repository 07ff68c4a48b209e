"""An engine that comes back gets the weights that the others serve, or, where the ranks have newer ones, none yet."""

from contextlib import nullcontext

import pytest

from megarl.cluster.workers.worker import WorkerFailed
from megarl.refit.refit import Refit
from megarl.resharding.direct.connections import TransferError
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


class Returning(OneEngine):
    """An engine that was restarted: what it is tried again for, if it is not one that has served since."""

    def __init__(self, *, is_on_its_way):
        super().__init__()
        self._is_on_its_way = is_on_its_way
        self.tried_for = []

    def restart_dead(self):
        return False

    def retry_restart(self, failure):
        if self._is_on_its_way:
            self.tried_for.append(failure)
        return self._is_on_its_way


class Failing(Noting):
    """A path that fails with each of some errors before it goes."""

    def __init__(self, *failures):
        super().__init__({"step": 0})
        self._failures, self.recovered = list(failures), []

    def send(self, version):
        if self._failures:
            raise self._failures.pop(0)
        return super().send(version)

    def recover(self, failure):
        if not isinstance(failure.error, TransferError):
            raise failure
        self.recovered.append(failure)


@pytest.fixture
def failures(tmp_path):
    """Three: of a transfer, of another transfer, and of anything else."""
    errors = [TransferError("a byte is lost"), TransferError("and another"), MemoryError("of a GPU")]
    return [WorkerFailed(str(error), tmp_path / "engine.log", error) for error in errors]


def test_an_engine_that_fails_with_its_first_weights_is_tried_again_but_for_a_transfer_that_may_be_sent_again(
    failures,
) -> None:
    first, second, other = failures
    engine, path = Returning(is_on_its_way=True), Failing(first, second, other)
    metrics = Refit(None, engine, path, [], timeout_s=1.0)(0)
    assert (path.recovered, engine.tried_for) == ([first], [second, other])
    assert (metrics["refit/repeated"], engine.version) == (1, 0)


@pytest.mark.parametrize("fails", [(0, 1), (2,)])
def test_one_that_has_served_since_it_began_is_not_tried_again(failures, fails) -> None:
    engine = Returning(is_on_its_way=False)
    refit = Refit(None, engine, Failing(*(failures[place] for place in fails)), [], timeout_s=1.0)
    with pytest.raises(WorkerFailed) as caught:
        refit(0)
    assert caught.value is failures[fails[-1]]
