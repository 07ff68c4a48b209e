"""Starts engines and ranks concurrently, since both take minutes with a large model."""

from collections.abc import Callable, Sequence

from converters.architectures import Architecture, adapter_architecture
from converters.errors import UserError
from megarl.cluster.colocation import GpuSharing, OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.worker import WorkerFailed
from megarl.models.policy import Model, check_loadable
from megarl.refit.choice import adapter_path, check_machines, direct_path, loader_path
from megarl.refit.log_prob_check import LogProbCheck
from megarl.refit.path import WeightPath
from megarl.refit.refit import Refit
from megarl.rollout import engine_kind
from megarl.schema import MegarlConfig, RefitConfig

_CHECKED_PROMPTS = 16
_CHECKED_TOKENS = 8


class EngineStart:
    """Engines that start while the ranks read the weights of `model`.

    On one machine the engines begin without weights, and get them by the first refit. Between machines there is no
    loader path: engines and ranks both load the same weights, and are compared before the ranks' weights change.
    Engines that only get an adapter load its base weights.

    Raises UserError, before engines start, if the configured path does not work on these machines.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        model: Model,
        config: MegarlConfig,
        prompts: Sequence[Sequence[int]],
        gpus: GpuSharing | None = None,
    ) -> None:
        """`prompts` are token ids; if refits are checked, engines answer some of them.

        If engines take turns with the trainer on the GPUs, they are up when this returns, and it is the trainer's turn.
        """
        machines = len({*trainer.nodes(), *engines.nodes()})
        check_machines(machines, config.refit, has_gpus=trainer.has_gpus)
        self._is_apart = machines > 1
        if self._is_apart:
            check_loadable(model, machines)
            _check_adapter_apart(config, machines)
        self._adapter = trainer.adapter_alone
        self._trainer, self._engines, self._model, self._config = trainer, engines, model, config
        self._prompts = [list(prompt) for prompt in prompts[:_CHECKED_PROMPTS]]
        self._refit: Refit | None = None
        self._gpus = gpus or OwnGpus()
        load_weights = self._is_apart or self._adapter is not None
        self._starting = engines.begin_start(model.folder, load_weights=load_weights, adapter=self._adapter)
        if self._gpus.are_shared:
            # Wait: engines measure the free memory while they start.
            self._wait_for_engines()
            self._gpus.switch_to(trainer)

    def compare(self) -> None:
        """Check that engines and ranks hold the same weights, if both have loaded them."""
        if self._is_apart and self._refit is None:
            self._wait_for_engines()
            self._refit = self._make_refit(direct_path)

    def finish(self) -> Refit:
        """Wait for the engines; return the refit that updates their weights from now on."""
        self.compare()
        if self._refit is None:
            self._wait_for_engines()
            self._refit = self._make_refit(loader_path if self._adapter is None else adapter_path)
        return self._refit

    def _wait_for_engines(self) -> None:
        if self._starting:
            self._engines.wait_started(self._starting)
            self._starting = []
            self._gpus.add(self._engines)

    @property
    def _sent(self) -> Architecture:
        """The part of the policy that is sent to the engines: the model or its adapter."""
        if self._adapter is not None:
            return adapter_architecture(self._model.architecture, self._adapter)
        rollout = self._config.rollout
        drafts = engine_kind(rollout.engine).drafts(rollout.engine_args)
        return self._model.architecture if drafts else self._model.without_prediction_layers

    def _make_refit(
        self, make_path: Callable[[TrainerGroup, EngineGroup, Architecture, RefitConfig], WeightPath]
    ) -> Refit:
        sent = self._sent
        refit = Refit(
            self._trainer,
            self._engines,
            self._with_all_engines(lambda: make_path(self._trainer, self._engines, sent, self._config.refit)),
            list(sent.hf_shapes),
            timeout_s=self._config.refit.timeout_s,
            kv="keep" if self._config.schedule.in_flight == "keep" else "recompute",
            check=self._log_prob_check(),
            gpus=self._gpus,
        )
        self._engines.recover_with(refit.catch_up)
        return refit

    def _with_all_engines(self, make_path: Callable[[], WeightPath]) -> WeightPath:
        """Make a path to engines that are all up; make it again if one dies and is replaced meanwhile."""
        while True:
            # Engines must hold their weights while they are traced.
            self._gpus.begin_refit()
            try:
                if len(self._engines.up) == len(self._engines):
                    return make_path()
            except WorkerFailed:
                if not self._engines.restart_dead():
                    raise
            self._gpus.switch_to(self._engines)
            self._engines.wait_for_all()

    def _log_prob_check(self) -> LogProbCheck | None:
        if self._config.refit.verify != "logprobs":
            return None
        tokens = min(_CHECKED_TOKENS, self._config.rollout.max_response_tokens)
        return LogProbCheck(self._prompts, tokens, self._config.refit.log_prob_tolerance)


def _check_adapter_apart(config: MegarlConfig, machines: int) -> None:
    if not config.lora.merge:
        raise UserError(
            f"lora.merge=false sends the adapter through the memory of one machine, and the trainer and the engines run"
            f" on {machines} machines: set lora.merge=true"
        )
    if config.lora.path is not None:
        raise UserError(
            f"the trainer and the engines run on {machines} machines, where engines begin with the weights of"
            f" model.path and the trainer would begin with those that lora.path={config.lora.path} makes of them:"
            " merge the adapter into a folder of its own and give that as model.path, or keep to one machine"
        )
