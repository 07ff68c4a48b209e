"""Accuracy of a HuggingFace folder: an engine that loads it afresh, greedy responses, the reward function."""

from pathlib import Path

from converters.errors import UserError
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.runtime import ray_cluster
from megarl.config.schema import MegarlConfig
from megarl.data import load_prompts
from megarl.job import LOGS
from megarl.model import read_model
from megarl.rewards import load_reward
from megarl.stages.evaluate import evaluate


def evaluate_model(config: MegarlConfig) -> dict[str, float]:
    """Metrics of `config.model` on `config.data.eval_files`; see `megarl.stages.evaluate`."""
    if config.model.megatron_checkpoint:
        raise UserError(
            f"model.megatron_checkpoint={config.model.megatron_checkpoint} cannot be evaluated as it is: engines read"
            " HuggingFace folders; set model.path to what megarl export makes of it"
        )
    model = read_model(config.model, config.rollout.stop_token_ids)
    prompts = load_prompts(config.data.eval_files, model.tokenizer, config.data).prompts
    function = load_reward(config.reward.function)
    logs = Path(config.output_dir) / LOGS
    with ray_cluster(config.cluster), EngineGroup(config.rollout, config.cluster, logs) as engines:
        engines.wait_started(engines.begin_start(model.folder, load_weights=True))
        return evaluate(
            engines,
            prompts,
            function,
            model.tokenizer,
            config.reward,
            max_tokens=config.rollout.max_response_tokens,
            stop_token_ids=model.stop_token_ids,
        )
