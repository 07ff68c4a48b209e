"""Evaluate the policy by greedy or sampled responses to held-out prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.cluster.engines.engines import Engines
from megarl.data import Prompt, PromptGroup, trajectories_of
from megarl.diagnostics.answers import answer_of
from megarl.diagnostics.pass_at_k import Answers, accuracy_by_source, by_source
from megarl.rewards import Scorer
from megarl.rollout.protocol import SamplingParameters
from megarl.schema import LoopConfig, MegarlConfig
from megarl.stages.reward import begin_scoring, check_any_scored, text_of, with_outcomes
from megarl.stages.rollout import requests_for, with_answers

# Keeps the seeds of an evaluation apart from others derived from loop.seed and a number.
_EVALUATION = 0xE7A1
# Keeps the prefix cache of an evaluation apart from that of training.
_SALT = "evaluation"


@dataclass(frozen=True)
class EvalSettings:
    """How held-out prompts are answered.

    The `samples` of each prompt are drawn from the whole distribution (no top-p or top-k) at `temperature`. If that is
    None, a single sample is greedy and several are drawn at 1. Every evaluation with the same `seed` uses the same
    random streams.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    samples: int = 1
    temperature: float | None = None
    seed: int = 0

    @classmethod
    def of(cls, config: MegarlConfig, stop_token_ids: Sequence[int]) -> "EvalSettings":
        """The settings that a configuration asks for."""
        loop, max_tokens = config.loop, config.rollout.max_response_tokens
        return cls(max_tokens, tuple(stop_token_ids), loop.eval_samples, loop.eval_temperature, loop.seed)


def evaluate(
    engines: Engines,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvalSettings,
) -> dict[str, float]:
    """Answer and score the prompts; returns the accuracy (mean reward) and the rest of `evaluation_metrics`.

    No refit happens meanwhile, so all responses come from one version of the weights. Training requests in flight
    continue at lower priority and share no cached prefixes with these.
    """
    sampling = _sampling(len(prompts), settings)
    # Negative ordinals share no conversation with training prompts, and are served before them.
    drawn = [PromptGroup(prompt, place - len(prompts)) for place, prompt in enumerate(prompts)]
    groups = score_all(sample_all(engines, drawn, sampling), scorer, tokenizer)
    sampled = trajectories_of(groups)
    return {
        **evaluation_metrics([group.only_scored() for group in groups], tokenizer, settings.samples),
        "eval/dropped": float(sum(each.score is None for each in sampled)),
        "eval/truncated_fraction": float(np.mean([each.is_truncated for each in sampled])),
        "eval/response_length": float(np.mean([each.sampled_tokens for each in sampled])),
    }


def evaluates_after(step: int, loop: LoopConfig) -> bool:
    """Whether to evaluate after `step`: every `eval_every` steps and after the last step; never if that is 0."""
    return loop.eval_every > 0 and (step == loop.steps or step % loop.eval_every == 0)


def sample_all(
    engines: Engines, groups: Sequence[PromptGroup], sampling: Sequence[SamplingParameters]
) -> Iterator[PromptGroup]:
    """Sample each group with the parameters at its index; yields groups as they finish, in any order."""
    # The salt, so that later training samples do not depend on whether an evaluation came before.
    requests = [replace(each, cache_salt=_SALT) for each in requests_for(groups, sampling, with_baselines=False)]
    for place, turns in engines.generate_each(requests):
        yield with_answers(groups[place], [turns])


def score_all(sampled: Iterable[PromptGroup], scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> list[PromptGroup]:
    """Score groups while others are still being sampled; returns them ordered by ordinal.

    Raises RewardFailed with the sample if the configuration says to stop for it, and UserError if no response could be
    scored or a data_source has no reward.
    """
    pending, groups = scorer.begin(), []
    try:
        for group in sampled:
            groups.append(group)
            begin_scoring(pending, group, tokenizer)
        outcomes = pending.finish()
    except BaseException:
        pending.cancel()
        raise
    groups.sort(key=lambda each: each.ordinal)
    scored = [with_outcomes(group, outcomes, scorer.config, max_response_tokens=None) for group in groups]
    check_any_scored(scored)
    return scored


def evaluation_metrics(
    groups: Sequence[PromptGroup], tokenizer: PreTrainedTokenizerBase, samples: int
) -> dict[str, float]:
    """Accuracy over all prompts and, if there are several data sources, of each; with several samples also the @k.

    Accuracy is the mean over the prompts of the mean reward of their responses. Prompts without a response are left
    out; at least one prompt must have one.
    """
    scored = [group for group in groups if group.trajectories]
    if samples > 1:
        found = by_source([_answers(group, tokenizer) for group in scored], samples)
    else:
        # With one sample there is no majority vote, so no answer has to be decoded.
        found = accuracy_by_source([Answers(group.prompt.data_source, (), group.rewards) for group in scored])
    return {f"eval/{name}": value for name, value in found.items()}


def _answers(group: PromptGroup, tokenizer: PreTrainedTokenizerBase) -> Answers:
    texts = [text_of(each, tokenizer) for each in group.trajectories]
    return Answers(group.prompt.data_source, [answer_of(text) for text in texts], group.rewards)


def _sampling(prompts: int, settings: EvalSettings) -> list[SamplingParameters]:
    one = SamplingParameters(
        samples=settings.samples,
        temperature=1.0 if settings.temperature is None else settings.temperature,
        max_tokens=settings.max_tokens,
        stop_token_ids=settings.stop_token_ids,
    )
    if settings.samples == 1 and settings.temperature is None:
        return [replace(one, temperature=0.0)] * prompts
    seeds = np.random.SeedSequence((settings.seed, 0, _EVALUATION)).generate_state(prompts).tolist()
    return [replace(one, seed=each) for each in seeds]
