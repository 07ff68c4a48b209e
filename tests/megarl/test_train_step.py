"""From drawn prompts to the groups of a step: who is asked for what, how often, and with which seeds."""

from sampling_job import Answers, TenTimesTheToken, job_of, sample

from megarl.stages.rollout import sampling_parameters
from megarl.tracking.clock import Clock


def test_one_rollout_gives_every_drawn_prompt_its_samples(scorer) -> None:
    job = job_of(scorer, Answers("10", "11", "00", "31"), prompts_per_step=2)
    for ordinals in ((0, 1), (2, 3)):
        sampled, groups = sample(job, Clock())
        assert sampled == groups
        assert job.rollouts.metrics()["groups/rounds"] == 1
        assert [(group.ordinal, group.prompt.index) for group in groups] == [(each, each) for each in ordinals]
    assert [group.rewards for group in groups] == [[0, 0], [3, 1]]
    assert [each.turns[0].prompt_ids.tolist() for group in groups for each in group.trajectories] == [
        [2],
        [2],
        [3],
        [3],
    ]


def test_a_sample_has_the_seed_of_its_draw_whatever_step_and_rollout_it_falls_in(scorer) -> None:
    def seeds(*texts, prompts_per_step, dynamic_sampling=False):
        job = job_of(scorer, Answers(*texts), prompts_per_step=prompts_per_step, dynamic_sampling=dynamic_sampling)
        while job.sampler.drawn < 6:
            sample(job, Clock())
        return {r.prompt_token_ids[0]: r.sampling.seed for call in job.engines.calls for r in call}

    in_steps_of_two = seeds(*["01"] * 6, prompts_per_step=2)
    assert len(set(in_steps_of_two.values())) == 6
    assert seeds(*["01"] * 6, prompts_per_step=3) == in_steps_of_two
    assert seeds("00", "00", "01", "00", "00", "01", prompts_per_step=2, dynamic_sampling=True) == in_steps_of_two


def test_the_same_prompt_in_another_epoch_and_another_run_has_another_seed(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=10)
    for _ in range(2):
        sample(job, Clock())
    first, second = ([request.sampling.seed for request in call] for call in job.engines.calls)
    job.config.loop.seed += 1
    (third,) = {tuple(each.seed for each in sampling_parameters(job.config, (), range(10)))}
    assert len({*first, *second, *third}) == 30


def test_the_greedy_baseline_has_the_score_of_the_model_as_the_others_have(scorer) -> None:
    job = job_of(scorer, Answers("10", "11", "00"), reward_model=TenTimesTheToken(), advantage="remax")
    _, groups = sample(job, Clock())
    assert [group.rewards for group in groups] == [[11, 0], [11, 11], [0, 0]]
    assert [group.baseline.reward for group in groups] == [22, 22, 22]
    ((*sampled, _, _, _),) = ([request.sampling.temperature for request in call] for call in job.engines.calls)
    assert sampled == [1, 1, 1]
