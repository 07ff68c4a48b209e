"""From prompts to scored responses: what a greedy baseline is made of."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.data import Prompt, Trajectory, Turn
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import Score, Scorer
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.schema import RewardConfig
from megarl.stages.reward import Scoring
from megarl.stages.sample import sample
from megarl.tracking.clock import Clock

TOKENIZER = make_tokenizer()
# An async one: no process has to start.
NUMBER = f"{Path(__file__).parents[1] / 'reward_functions.py'}:as_number_later"


class Answers:
    """Answers with the digit 1 where it samples, and with 2 where it is greedy, the last prompt first."""

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        for place, request in reversed(list(enumerate(requests))):
            tokens = TOKENIZER("2" if request.sampling.temperature == 0 else "1").input_ids
            turn = Turn.of(request.prompt_token_ids, tokens, [-0.1] * len(tokens), [0] * len(tokens), "stop")
            yield place, [turn] * request.sampling.samples


def test_the_greedy_baseline_has_the_score_of_the_model_as_the_others_have() -> None:
    """The score is ten times the digit, beside a reward of the digit itself."""

    def by_a_model(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [replace(each, score=Score(11 * each.reward)) for each in trajectories]

    prompts = [Prompt(index, "any", [1], "truth", {}) for index in range(3)]
    with Scorer(RewardConfig(function=NUMBER, workers=2)) as scorer:
        experience = sample(
            Answers(),  # type: ignore[arg-type]
            Scoring(scorer, TOKENIZER),
            prompts,
            [SamplingParameters(samples=2, max_tokens=4)] * 3,
            Clock(),
            with_baselines=True,
            add_scores=by_a_model,
        )
    assert [(each.group, each.reward, each.baseline_reward) for each in experience.scored] == [
        (group, 11.0, 22.0) for group in (0, 0, 1, 1, 2, 2)
    ]
    assert len(experience.sampled) == 6
