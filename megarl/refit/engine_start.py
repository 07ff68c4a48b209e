"""Engines and ranks start side by side: with a large model, both take minutes."""

from collections.abc import Sequence

from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.trainer_group import TrainerGroup
from megarl.models.policy import Model, check_loadable
from megarl.refit.log_prob_check import LogProbCheck
from megarl.refit.refit import Refit, check_machines
from megarl.schema import MegarlConfig

_CHECKED_PROMPTS = 16
_CHECKED_TOKENS = 8


class EngineStart:
    """Engines that start while the ranks read the weights of `model`.

    On one machine the engines begin without weights, and get them by the first refit. Between machines nothing goes by
    name: there, engines and ranks begin with the same weights, and are compared before the ranks' become others.

    Raises UserError, before anything starts, where the way of the weights that the configuration asks for does not go
    between machines.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        model: Model,
        config: MegarlConfig,
        prompts: Sequence[list[int]],
    ) -> None:
        """`prompts` are token ids that a refit may be probed with."""
        machines = len({*trainer.nodes(), *engines.nodes()})
        check_machines(machines, config.refit)
        self._is_apart = machines > 1
        if self._is_apart:
            check_loadable(model, machines)
        self._trainer, self._engines, self._model, self._config = trainer, engines, model, config
        self._prompts = prompts[:_CHECKED_PROMPTS]
        self._refit: Refit | None = None
        self._starting = engines.begin_start(model.folder, load_weights=self._is_apart)

    def compare(self) -> None:
        """Where engines and ranks begin with the same weights, see that they do; for ranks that have read them."""
        if self._is_apart and self._refit is None:
            self._refit = self._join()
            self._refit.confirm()

    def finish(self) -> Refit:
        """Wait for the engines. How their weights come from now on."""
        self.compare()
        return self._refit or self._join()

    def _join(self) -> Refit:
        self._engines.wait_started(self._starting)
        config, architecture = self._config.refit, self._model.architecture
        return Refit(
            self._trainer, self._engines, architecture, config, self._log_prob_check(), has_loaded=self._is_apart
        )

    def _log_prob_check(self) -> LogProbCheck | None:
        if self._config.refit.verify != "logprobs":
            return None
        tokens = min(_CHECKED_TOKENS, self._config.rollout.max_response_tokens)
        return LogProbCheck(self._prompts, tokens, self._config.refit.log_prob_tolerance)
