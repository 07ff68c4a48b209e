"""The requests that a rollout makes to engines."""

from dataclasses import replace

from trajectories import group

from megarl.rollout.protocol import SamplingParameters
from megarl.schema import MegarlConfig
from megarl.stages.rollout import requests_for, sampling_parameters


def sampling(ordinals: list[int], seed: int = 0) -> list[SamplingParameters]:
    config = MegarlConfig()
    config.rollout.temperature, config.rollout.top_p, config.rollout.top_k = 0.7, 0.9, 5
    config.rollout.max_response_tokens, config.loop.samples_per_prompt, config.loop.seed = 11, 3, seed
    return sampling_parameters(config, (7, 8), ordinals)


def test_prompts_are_sampled_as_configured_with_seeds_of_their_own() -> None:
    found = sampling([4, 9])
    expected = SamplingParameters(3, 0.7, 0.9, 5, max_tokens=11, stop_token_ids=(7, 8))
    assert [replace(each, seed=None) for each in found] == [expected] * 2
    assert found == [*sampling([4]), *sampling([9])]
    seeds = {each.seed for seed in (0, 1) for each in sampling([4, 9], seed)}
    assert len(seeds) == 4
    assert all(each is not None and 0 <= each < 2**63 for each in seeds)
    assert max(each.bit_length() for each in seeds if each is not None) > 60


def test_greedy_responses_are_asked_for_after_all_samples_and_beside_theirs() -> None:
    groups = [group(4, [1, 2]), group(9, [3])]
    requests = requests_for(groups, sampling([4, 9]), with_baselines=True)
    assert requests[:2] == requests_for(groups, sampling([4, 9]), with_baselines=False)
    assert [each.sampling for each in requests[:2]] == sampling([4, 9])
    assert [(each.prompt_token_ids, each.priority, each.conversation) for each in requests] == [
        ([1, 2], 4, 4),
        ([3], 9, 9),
    ] * 2
    # The most likely tokens of all, in one response.
    greedy = SamplingParameters(temperature=0.0, max_tokens=11, stop_token_ids=(7, 8))
    assert [each.sampling for each in requests[2:]] == [greedy] * 2
