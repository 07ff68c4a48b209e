"""A refit: the trained weights of all ranks into all engines, as one new version or not at all."""

from collections.abc import Sequence

from megarl.cluster.engine_group import Engines
from megarl.cluster.trainer_group import TrainerGroup
from megarl.cluster.turns import Turns
from megarl.cluster.worker_group import WorkerFailed
from megarl.refit.log_prob_check import LogProbCheck
from megarl.refit.path import Path


class Refit:
    """Makes every refit a transaction: begin, the weights on a path, commit; then the check, if there is one.

    `path` is that of the first refit, after which it may hand over to another one. `names` are those of all HF tensors.
    `loaded_version` is what the engines have already, if they read weights when they started: it is not sent again.
    Where trainer and engines take `turns`, a refit has one of its own.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: Engines,
        path: Path,
        names: Sequence[str],
        *,
        timeout_s: float,
        check: LogProbCheck | None = None,
        loaded_version: int | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._path = path
        self._names = list(names)
        self._timeout_s = timeout_s
        self._check = check
        self._loaded_version = loaded_version
        self._turns = turns or Turns()

    @property
    def description(self) -> str:
        """The path of the next weights, in a few words."""
        return self._path.description

    def __call__(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's present weights as `version`; they serve nothing in between. Metrics."""
        path, size, repeated = self._path, 0, False
        self._turns.begin_refit()
        if version != self._loaded_version:
            try:
                size = self._transaction(version)
            except WorkerFailed as failure:
                # Where all processes are there, what a failed update has written is no harm: it is written again.
                path.recover(failure)
                repeated = True
                size = self._transaction(version)
        metrics = {"refit/direct": float(path.is_direct), "refit/repeated": float(repeated), "refit/bytes": size}
        self._path = path.settle(version)
        if self._check is not None:
            metrics |= self._check(self._trainer, self._engines, self._turns)
        return metrics

    def _transaction(self, version: int) -> int:
        self._engines.begin_update(version, self._names, self._timeout_s)
        size = self._path.send(version)
        self._engines.commit_update(version, self._timeout_s)
        return size
