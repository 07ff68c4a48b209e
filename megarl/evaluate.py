"""Evaluate a HuggingFace folder: a fresh engine loads it, answers the held-out prompts, and rewards score them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from converters.errors import UserError
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.data import Prompt, PromptGroup, Turn
from megarl.models.policy import Model, check_cut, check_ends, read_model
from megarl.models.prompts import read_prompts
from megarl.process.phase import phase
from megarl.rewards import Scorer
from megarl.run.opening import open_processes
from megarl.schema import MegarlConfig
from megarl.stages.evaluate import EvalSettings, evaluate, sample_all
from megarl.stages.rollout import sampling_parameters


@dataclass(frozen=True)
class FreshEngines:
    """Engines that have loaded a HuggingFace folder, and the prompts of `config.data.eval_files`."""

    config: MegarlConfig
    model: Model
    prompts: list[Prompt]
    scorer: Scorer
    engines: EngineGroup

    def evaluate(self) -> dict[str, float]:
        """Answer the prompts and return the metrics of `megarl.stages.evaluate`."""
        with phase(f"answering {len(self.prompts)} prompts"):
            settings = EvalSettings.of(self.config, self.model.stop_token_ids)
            return evaluate(self.engines, self.prompts, self.scorer, self.model.tokenizer, settings)

    def sample(self) -> list[tuple[list[int], Turn]]:
        """Sample one response to each prompt with the rollout settings; returns prompt tokens and response."""
        drawn = [PromptGroup(prompt, place) for place, prompt in enumerate(self.prompts)]
        one = replace(self.config, loop=replace(self.config.loop, samples_per_prompt=1))
        sampling = sampling_parameters(one, self.model.stop_token_ids, range(len(drawn)))
        groups = sample_all(self.engines, drawn, sampling)
        return [(list(group.prompt.token_ids), group.trajectories[0].turns[0]) for group in groups]


@contextmanager
def fresh_engines(config: MegarlConfig) -> Iterator[FreshEngines]:
    """Start engines that load `config.model` from its folder; they are stopped when the context exits.

    Raises UserError for a Megatron checkpoint, and for a model, prompts or a reward that do not fit together.
    """
    if config.model.megatron_checkpoint:
        raise UserError(
            f"model.megatron_checkpoint={config.model.megatron_checkpoint} cannot be evaluated as it is: engines read"
            " HuggingFace folders; set model.path to what megarl export makes of it"
        )
    with ExitStack() as stack:
        with phase("checking model and data"):
            model = read_model(config.model, config.rollout.stop_token_ids)
            check_ends(model)
            check_cut(model.without_prediction_layers, config.rollout)
            prompts = read_prompts(config.data.eval_files, model, config)
            scorer = stack.enter_context(Scorer(config.reward))
            scorer.check_questions(prompts)
        processes = stack.enter_context(open_processes(config, {}, engines=True))
        with phase("starting the engines"):
            engines = processes.engines_with(model)
        yield FreshEngines(config, model, prompts, scorer, engines)


def evaluate_model(config: MegarlConfig) -> dict[str, float]:
    """Evaluate `config.model` on `config.data.eval_files`; returns the metrics of `megarl.stages.evaluate`."""
    with fresh_engines(config) as fresh:
        return fresh.evaluate()
