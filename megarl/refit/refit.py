"""A refit: the trained weights of all ranks into all engines, as one new version or not at all."""

from converters.architectures import Architecture
from converters.errors import UserError
from megarl.cluster.engine_group import Engines
from megarl.cluster.trainer_group import TrainerGroup
from megarl.cluster.worker_group import WorkerFailed
from megarl.refit.direct import DirectPath, NoDirectPathError
from megarl.refit.loader import LoaderPath
from megarl.refit.log_prob_check import LogProbCheck
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports import MAPPED
from megarl.schema import RefitConfig


def check_machines(machines: int, config: RefitConfig) -> None:
    """Raise UserError if `config` asks for a way of the weights that ends at one machine, and there are several."""
    if machines == 1:
        return
    apart = f"and the trainer and the engines run on {machines} machines"
    if config.path == "loader":
        raise UserError(f"refit.path=loader goes through the memory of one machine, {apart}: set it to auto")
    if config.transport in MAPPED.values():
        raise UserError(
            f"refit.transport={config.transport} is memory of one machine, {apart}: set it to auto or point_to_point"
        )


class Refit:
    """Chooses the path of the weights and makes every refit a transaction.

    The engines' parameters are compared once with what the plan would write into them: then all refits go by plan.
    Before that, the first weights of engines without any go by name, through the engine's own loader, and all others
    too if the engines keep a parameter in another form. Engines that `has_loaded` what the ranks have are compared at
    once (`confirm`), and nothing goes by name. A `log_prob_check` follows every refit.

    Raises UserError where engine and policy are not the same model, before any weights move, and where nothing may go
    by name and the plan is not possible.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: Engines,
        architecture: Architecture,
        config: RefitConfig,
        log_prob_check: LogProbCheck | None = None,
        *,
        has_loaded: bool = False,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._config = config
        self._log_prob_check = log_prob_check
        self._names = list(architecture.hf_shapes)
        self._named: LoaderPath | None = None
        self._planned: DirectPath | None = None
        self._is_confirmed = False
        self._refusal = ""
        self._loaded_version: int | None = None
        self.reason = "this is the first refit"
        """Why weights go by name; empty if they do not."""
        if not has_loaded:
            self._named = LoaderPath(trainer, engines, architecture.hf_shapes, config.bucket_bytes)
        try:
            self._planned = DirectPath(trainer, engines, architecture, config)
        except NoDirectPathError as error:
            self._refusal = str(error)
            self._stay_named(self._refusal)
        if config.path == "loader":
            self._planned, self.reason = None, "refit.path=loader"

    @property
    def description(self) -> str:
        """How the next weights will go."""
        if self._is_confirmed and self._planned is not None:
            return f"direct, through {self._planned.transport}"
        return f"loader ({self.reason})"

    def confirm(self) -> None:
        """Compare engines that have loaded the ranks' present weights, as version 0, with what the plan would write.

        Raises UserError if there is a difference.
        """
        assert self._planned is not None
        self._confirm(self._planned, version=0)
        self._loaded_version = 0

    def __call__(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's present weights as `version`; they serve nothing in between. Metrics."""
        metrics = self._update(version)
        if self._log_prob_check is not None:
            metrics |= self._log_prob_check(self._trainer, self._engines)
        if self._planned is not None and not self._is_confirmed:
            self._confirm(self._planned, version)
        return metrics

    def _update(self, version: int) -> dict[str, float]:
        planned = self._planned if self._is_confirmed else None
        repeated = False
        try:
            size = self._transaction(version, planned)
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
            planned.connect()
            size = self._transaction(version, planned)
        return {"refit/direct": float(planned is not None), "refit/repeated": float(repeated), "refit/bytes": size}

    def _transaction(self, version: int, planned: DirectPath | None) -> int:
        if version == self._loaded_version:
            return 0
        self._engines.begin_update(version, self._names, self._config.timeout_s)
        if planned is not None:
            size = planned.send(version)
        else:
            assert self._named is not None
            size = self._named.send()
        self._engines.commit_update(version, self._config.timeout_s)
        return size

    def _confirm(self, planned: DirectPath, version: int) -> None:
        planned.connect()
        if differing := planned.differing(version):
            planned.close()
            self._stay_named(f"the engine does not keep {differing[0]} as it was loaded")
            return
        if self._named is not None:
            self._named.close()
        self._is_confirmed, self.reason = True, ""

    def _stay_named(self, reason: str) -> None:
        self._planned, self.reason = None, reason
        if self._named is None:
            raise UserError(
                f"{reason}, so that weights cannot go straight into it, which is the only way between machines: keep"
                " trainer and engines on one, give rollout.engine_args another kernel, or, if there is a"
                " model.megatron_checkpoint, give model.path its weights"
            )
        if self._config.path == "direct":
            raise UserError(f"refit.path=direct is not possible: {reason}; set refit.path to auto or loader")
