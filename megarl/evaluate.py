"""How good a HuggingFace folder is: an engine that loads it afresh, responses, the reward function."""

from contextlib import ExitStack
from pathlib import Path

from converters.errors import UserError
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.runtime import ray_cluster
from megarl.data import load_prompts
from megarl.models.policy import read_model
from megarl.output.places import LOGS
from megarl.process.phase import phase
from megarl.rewards import Scorer
from megarl.rollout import engine_configuration
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
        stack.enter_context(ray_cluster(config.cluster))
        with phase("starting the engines"):
            logs = Path(config.output_dir) / LOGS
            engines = stack.enter_context(EngineGroup(engine_configuration(config), config.cluster, logs))
            engines.wait_started(engines.begin_start(model.folder, load_weights=True))
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
