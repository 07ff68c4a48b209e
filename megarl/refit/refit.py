"""A refit: brings the trained weights of all ranks into all engines, as one new version or not at all."""

from collections.abc import Sequence

from megarl.cluster.colocation import GpuSharing, OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.worker import WorkerFailed
from megarl.refit.log_prob_check import LogProbCheck
from megarl.refit.path import WeightPath
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.transfer_stats import TransferStats
from megarl.rollout.protocol import KeysAndValues


class Refit:
    """Runs every refit as a transaction: begin, send the weights on a path, commit; then the check, if there is one.

    `path` moves the weights of the first refit; it may choose another path for later ones. `names` are the names of all
    HF tensors. Engines that already have a version, from the folder that they started with, are not sent it again. An
    engine that dies is left out, and gets the weights after its restart. If trainer and engines share `gpus`, a refit
    is a phase of its own, in which both hold only their weights there.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        path: WeightPath,
        names: Sequence[str],
        *,
        timeout_s: float,
        kv: KeysAndValues = "recompute",
        check: LogProbCheck | None = None,
        gpus: GpuSharing | None = None,
    ) -> None:
        """`kv` says what happens to the KV cache of responses in flight."""
        self._trainer = trainer
        self._engines = engines
        self._path = path
        self._names = list(names)
        self._timeout_s = timeout_s
        self._kv = kv
        self._recomputed = 0
        self._check = check
        self._version = -1
        self._is_outdated = False
        """Whether the ranks have trained on since `_version`."""
        self._gpus = gpus or OwnGpus()

    @property
    def description(self) -> str:
        """The path of the next refit, in a few words."""
        return self._path.description

    def __call__(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's present weights as `version`; they serve nothing meanwhile.

        Returns metrics.
        """
        is_direct = self._path.is_direct  # `_update` may choose another path for later refits
        moved, repeated = self._update(version)
        recomputed, self._recomputed = self._recomputed, 0
        metrics = {
            "refit/direct": float(is_direct),
            "refit/repeated": float(repeated),
            "refit/bytes": moved.size_bytes,
            "refit/tokens_recomputed": float(recomputed),
        }
        if moved.compared:
            metrics["refit/changed"] = moved.changed / moved.compared
        self._version, self._is_outdated = version, False
        if self._check is not None:
            metrics |= self._check(self._trainer, self._engines, self._gpus)
        return metrics

    def mark_outdated(self) -> None:
        """Note that the ranks' weights are newer than the engines', until the next refit."""
        self._is_outdated = True

    def catch_up(self) -> None:
        """Give the present version to engines that lack it, if the ranks still have it.

        On shared GPUs this would interrupt the other engines, so there it waits for the next refit, unless no engine
        has the present version.
        """
        if self._is_outdated:
            return
        if self._gpus.are_shared and len(self._engines.with_version(self._version)):
            return
        self._update(self._version)
        self._gpus.switch_to(self._engines)

    def _update(self, version: int) -> tuple[TransferStats, bool]:
        """Update all engines; return how much was sent, and whether that had to be repeated."""
        with self._engines.undisturbed():
            return self._update_undisturbed(version)

    def _update_undisturbed(self, version: int) -> tuple[TransferStats, bool]:
        repeated = recovered = False
        while True:
            try:
                moved = self._send(version)
                self._path.set_engines(self._engines.with_version(version))
                self._path = self._path.next_path(version)
            except WorkerFailed as failure:
                repeated = True
                if self._engines.restart_dead():
                    continue
                # A failed transfer says little about who is to blame, so the first time everything is sent again.
                may_send_again = not recovered and isinstance(failure.error, TransferError)
                if not may_send_again and self._engines.retry_restart(failure):
                    continue
                if recovered:
                    raise
                # All processes are alive: what the failed update has written does no harm, as it is overwritten.
                self._path.recover(failure)
                recovered = True
            else:
                return moved, repeated

    def _send(self, version: int) -> TransferStats:
        """Run a transaction with the engines that are up and lack the version; return how much was sent."""
        moved = TransferStats()
        while True:
            self._gpus.begin_refit()
            if len(engines := self._engines.without_version(version)):
                self._path.set_engines(engines)
                engines.begin_update(version, self._names, self._timeout_s)
                moved += self._path.send(version)
                self._recomputed += engines.commit_update(version, self._timeout_s, self._kv)
            elif len(self._engines.with_version(version)):
                return moved
