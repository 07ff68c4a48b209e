"""How good the policy is: greedy responses to held-out prompts, or several sampled ones."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.cluster.engine_group import EngineGroup
from megarl.data import Prompt, Trajectory
from megarl.diagnostics.answers import answer_of
from megarl.diagnostics.validation import Answers, by_source
from megarl.rewards import Scorer
from megarl.rollout.protocol import SamplingParameters
from megarl.stages.reward import Scoring
from megarl.stages.sample import sample
from megarl.tracking.clock import Clock

# Keeps the seeds of an evaluation apart from those of training steps, which are (seed, step).
_EVALUATION = 0xE7A1


def evaluate(
    engines: EngineGroup,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, float]:
    """Accuracy, which is the mean reward, and what several responses to a prompt give; see `evaluation_metrics`.

    One of the `samples` is greedy, more are sampled from the whole distribution at `temperature`. Every evaluation with
    the same `seed` samples with the same random streams.
    """
    sampling = _sampling(len(prompts), samples, temperature, max_tokens, tuple(stop_token_ids), seed)
    # A clock of its own: to a training step an evaluation is one stage, which the loop times.
    experience = sample(engines, Scoring(scorer, tokenizer), prompts, sampling, Clock())
    # Later samples must not depend on whether an evaluation came before.
    engines.reset_prefix_cache()
    return {
        **evaluation_metrics(experience.scored, tokenizer, samples),
        "eval/dropped": float(len(experience.sampled) - len(experience.scored)),
        "eval/truncated_fraction": float(np.mean([t.finish_reason == "length" for t in experience.sampled])),
        "eval/response_length": float(np.mean([len(t.token_ids) for t in experience.sampled])),
    }


def evaluation_metrics(
    scored: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, samples: int
) -> dict[str, float]:
    """Accuracy of all prompts and, if there are several data sources, of each; with several samples also the @k.

    The accuracy is the mean over the prompts of the mean reward of their responses. There is at least one.
    """
    if samples > 1:
        found = by_source(_answers(scored, tokenizer), samples)
        mean = f"mean_at_{samples}"
        found |= {f"{name.removesuffix(mean)}accuracy": x for name, x in found.items() if name.endswith(mean)}
    else:
        found = _accuracies(scored)
    return {f"eval/{name}": value for name, value in found.items()}


def _accuracies(scored: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        rewards[trajectory.prompt.data_source].append(trajectory.reward)
    means = {f"source/{source}/accuracy": sum(found) / len(found) for source, found in rewards.items()}
    overall = {"accuracy": sum(trajectory.reward for trajectory in scored) / len(scored)}
    return overall | means if len(means) > 1 else overall


def _answers(scored: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> list[Answers]:
    texts = tokenizer.batch_decode([trajectory.token_ids for trajectory in scored], skip_special_tokens=True)
    groups: dict[int, list[tuple[Trajectory, str]]] = defaultdict(list)
    for trajectory, text in zip(scored, texts, strict=True):
        groups[trajectory.group].append((trajectory, answer_of(text)))
    return [
        Answers(members[0][0].prompt.data_source, [text for _, text in members], [each.reward for each, _ in members])
        for members in groups.values()
    ]


def _sampling(
    prompts: int, samples: int, temperature: float, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int
) -> list[SamplingParameters]:
    if samples == 1:
        greedy = SamplingParameters(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        return [greedy] * prompts
    seeds = np.random.SeedSequence((seed, 0, _EVALUATION)).generate_state(prompts).tolist()
    return [
        SamplingParameters(
            samples=samples, temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop_token_ids, seed=each
        )
        for each in seeds
    ]
