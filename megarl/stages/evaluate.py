"""How good the policy is: greedy responses to held-out prompts."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megarl.cluster.engine_group import EngineGroup
from megarl.config.schema import RewardConfig
from megarl.data import Prompt
from megarl.rewards import RewardFunction
from megarl.rollout.protocol import SamplingParameters
from megarl.stages.reward import reward
from megarl.stages.rollout import rollout


def evaluate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    function: RewardFunction,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
) -> dict[str, float]:
    """Accuracy, the mean reward of one greedy response to each prompt, and how many could not be scored."""
    greedy = SamplingParameters(samples=1, temperature=0.0, max_tokens=max_tokens, stop_token_ids=tuple(stop_token_ids))
    trajectories = rollout(engines, prompts, [greedy] * len(prompts))
    # What is sampled later must not depend on whether an evaluation came before.
    engines.reset_prefix_cache()
    scored = reward(function, trajectories, tokenizer, config)
    return {
        "eval/accuracy": sum(trajectory.reward for trajectory in scored) / len(scored),
        "eval/dropped": float(len(trajectories) - len(scored)),
    }
