"""How good a HuggingFace folder is: an engine that loads it afresh, responses, the reward function."""

from contextlib import ExitStack

from converters.errors import UserError
from megarl.data import load_prompts
from megarl.models.policy import read_model
from megarl.process.phase import phase
from megarl.rewards import Scorer
from megarl.run.opening import open_processes
from megarl.schema import MegarlConfig
from megarl.stages.evaluate import evaluate


def evaluate_model(config: MegarlConfig) -> dict[str, float]:
    """Metrics of `config.model` on `config.data.eval_files`; see `megarl.stages.evaluate`."""
    if config.model.megatron_checkpoint:
        raise UserError(
            f"model.megatron_checkpoint={config.model.megatron_checkpoint} cannot be evaluated as it is: engines read"
            " HuggingFace folders; set model.path to what megarl export makes of it"
        )
    with ExitStack() as stack:
        with phase("checking model and data"):
            model = read_model(config.model, config.rollout.stop_token_ids)
            prompts = load_prompts(config.data.eval_files, model.tokenizer, config.data).prompts
            scorer = stack.enter_context(Scorer(config.reward))
            scorer.check_data_sources(prompt.data_source for prompt in prompts)
        processes = stack.enter_context(open_processes(config, {}, engines=True))
        with phase("starting the engines"):
            engines = processes.engines_with(model)
        stack.enter_context(phase(f"answering {len(prompts)} prompts"))
        return evaluate(
            engines,
            prompts,
            scorer,
            model.tokenizer,
            max_tokens=config.rollout.max_response_tokens,
            stop_token_ids=model.stop_token_ids,
            samples=config.loop.eval_samples,
            temperature=config.loop.eval_temperature,
            seed=config.loop.seed,
        )
