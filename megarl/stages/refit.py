"""A refit: the trained weights of all ranks into all engines, as one new version or not at all."""

from collections.abc import Callable

from converters.architectures import Architecture
from converters.errors import UserError
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.trainer_group import TrainerGroup
from megarl.cluster.worker_group import WorkerFailed
from megarl.config.schema import RefitConfig
from megarl.resharding.connections import TransferError
from megarl.stages.named_path import NamedPath
from megarl.stages.planned_path import NotPlannableError, PlannedPath
from megarl.stages.probe import Probe


class Refit:
    """Chooses the path of the weights and makes every refit a transaction.

    The first one goes by name, through the engine's own loader. Then the engines' parameters are compared with what
    the plan would have written: engines that keep one of them in another form go on by name. A `probe` follows every
    refit.

    Raises UserError where engine and policy are not the same model, before any weights move.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        architecture: Architecture,
        config: RefitConfig,
        probe: Probe | None = None,
    ) -> None:
        if len(nodes := {*trainer.nodes(), *engines.nodes()}) > 1:
            raise UserError(
                f"the trainer and the engines run on {len(nodes)} machines, but a refit goes through the shared memory "
                "of one: give them fewer ranks or replicas, or a machine with more cores"
            )
        self._trainer = trainer
        self._engines = engines
        self._config = config
        self._probe = probe
        self._names = list(architecture.hf_shapes)
        self._named = NamedPath(trainer, engines, architecture.hf_shapes, config.bucket_bytes)
        self._planned: PlannedPath | None = None
        self._is_confirmed = False
        self._refusal = ""
        self.reason = "refit.path=named"
        """Why weights go by name; empty if they do not."""
        if config.path != "named":
            self.reason = "this is the first refit"
            try:
                self._planned = PlannedPath(trainer, engines, architecture, config)
            except NotPlannableError as error:
                self._refusal = str(error)
                self._stay_named(self._refusal)

    @property
    def description(self) -> str:
        """How the next weights will go."""
        if self._is_confirmed and self._planned is not None:
            return f"planned, through {self._planned.transport}"
        return f"named ({self.reason})"

    def __call__(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's present weights as `version`; they serve nothing in between. Metrics."""
        metrics = self._update(version)
        if self._probe is not None:
            metrics |= self._probe(self._trainer, self._engines)
        if self._planned is not None and not self._is_confirmed:
            self._confirm(self._planned, version)
        return metrics

    def _update(self, version: int) -> dict[str, float]:
        planned = self._planned if self._is_confirmed else None
        repeated = False
        try:
            size = self._transaction(version, self._named.send if planned is None else lambda: planned.send(version))
        except WorkerFailed as failure:
            if planned is None and self._refusal and failure.error is not None:
                raise UserError(
                    f"the engine does not take the policy's weights, {self._refusal}: give rollout.engine_args nothing "
                    "that makes it another model than model.path"
                ) from failure
            # All processes are there, and what a failed update has written is no harm: it is written again.
            if planned is None or not isinstance(failure.error, TransferError):
                raise
            repeated = True
            planned.join()
            size = self._transaction(version, lambda: planned.send(version))
        return {"refit/planned": float(planned is not None), "refit/repeated": float(repeated), "refit/bytes": size}

    def _transaction(self, version: int, send: Callable[[], int]) -> int:
        self._engines.begin_update(version, self._names, self._config.timeout_s)
        size = send()
        self._engines.commit_update(version, self._config.timeout_s)
        return size

    def _confirm(self, planned: PlannedPath, version: int) -> None:
        planned.join()
        if differing := planned.differing(version):
            planned.close()
            self._stay_named(f"the engine does not keep {differing[0]} as it was loaded")
            return
        self._named.close()
        self._is_confirmed, self.reason = True, ""

    def _stay_named(self, reason: str) -> None:
        self._planned, self.reason = None, reason
        if self._config.path == "planned":
            raise UserError(f"refit.path=planned is not possible: {reason}; set refit.path to auto or named")
