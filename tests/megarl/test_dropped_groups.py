"""Dynamic sampling: groups that teach nothing are dropped and replaced, and the batch that they are for says so."""

import json
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from eventually import eventually
from sampling_job import NUMBER, Answers, Holding, OfLengths, TenTimesTheToken, job_of, sample

from converters.errors import UserError
from megarl.rewards import Scorer
from megarl.run.checkpoint_files import at_once
from megarl.schema import RewardConfig, ScheduleConfig
from megarl.tracking.clock import Clock


def test_prompts_that_teach_nothing_are_replaced_by_as_many_others(scorer) -> None:
    job = job_of(scorer, Answers("00", "11", "01", "10", "00", "20"), dynamic_sampling=True)
    sampled, groups = sample(job, Clock())
    metrics = job.rollouts.metrics()
    assert (metrics["schedule/dropped_equal"], metrics["schedule/dropped_unscored"]) == (3, 0)
    assert (metrics["schedule/length_sampled"], metrics["schedule/length_trained"]) == (1, 1)
    assert [len(call) for call in job.engines.calls] == [3, 1, 1, 1]
    assert [group.ordinal for group in groups] == [2, 3, 5]
    assert [group.rewards for group in groups] == [[0, 1], [1, 0], [2, 0]]
    assert [group.ordinal for group in sampled] == [0, 1, 2, 3, 4, 5]
    assert metrics["groups/rounds"] == 2
    assert len({request.sampling.seed for call in job.engines.calls for request in call}) == 6


def ahead_and_dropping(scorer, *texts, **algorithm):
    """A job of two prompts a step, one step ahead, that drops what is "00"."""
    ahead = ScheduleConfig(max_staleness=1)
    return job_of(scorer, Answers(*texts), prompts_per_step=2, schedule=ahead, dynamic_sampling=True, **algorithm)


def of_steps(job, steps):
    """Batches with the metrics of what was dropped for each, however far the engines were ahead."""
    found = []
    for _ in range(steps):
        taken = sample(job, Clock())
        dropped = [job.rollouts.metrics()[f"schedule/dropped_{why}"] for why in ("equal", "unscored")]
        found.append((taken, dropped))
    return found


DROPS_THE_FIFTH = [*["01"] * 4, "00", *["01"] * 5]


@pytest.mark.parametrize("is_dropped_early", [True, False])
def test_a_batch_tells_of_what_was_dropped_among_it_however_early_that_was(scorer, is_dropped_early) -> None:
    job = ahead_and_dropping(scorer, *DROPS_THE_FIFTH)
    job.rollouts.take(Clock())
    job.rollouts.drain()
    job.engines.answering.clear()
    job.rollouts.note_refit()
    if is_dropped_early:
        job.engines.answering.set()
        assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 4)
    taken = job.rollouts.take(Clock())
    job.engines.answering.set()
    assert [group.ordinal for group in taken.sampled] == [2, 3]
    job.rollouts.drain()
    job.rollouts.note_refit()
    ((taken, dropped),) = of_steps(job, 1)
    assert [group.ordinal for group in taken.sampled] == [4, 5, 6]
    assert [group.ordinal for group in taken.groups] == [5, 6]
    assert dropped == [1, 0]


@pytest.mark.parametrize("algorithm", [{"dynamic_sampling": True, "filter_on": "reward"}, {}])
def test_how_far_engines_are_ahead_changes_nothing_that_a_reward_model_scores_or_drops(scorer, algorithm) -> None:
    def run(held):
        engines, model = Holding(*DROPS_THE_FIFTH, held=held), TenTimesTheToken()
        ahead = ScheduleConfig(max_staleness=2)
        job = job_of(scorer, engines, reward_model=model, prompts_per_step=2, schedule=ahead, **algorithm)
        job.config.loop.steps = 4
        first = []
        taking = Thread(target=lambda: first.append(job.rollouts.take(Clock())))
        taking.start()
        if 0 in held:
            assert eventually(lambda: {2, 3, 4, 5} <= job.rollouts._awaiting_reward_model.keys())
            engines.released.set()
        taking.join(60)
        engines.released.set()
        job.rollouts.drain()
        job.rollouts.note_refit()
        return [*first, *(sample(job, Clock()) for _ in range(3))], model.together

    far, near = run([0, 1]), run([2, 3, 4, 5])
    assert far == near
    assert [each.ordinal for each in far[0][2].sampled] == [4, 5, 6] if algorithm else [4, 5]


def test_groups_that_were_dropped_before_a_checkpoint_are_told_of_by_the_batch_behind_them(scorer, tmp_path) -> None:
    before = ahead_and_dropping(scorer, *DROPS_THE_FIFTH)
    sample(before, Clock())
    # Two draws are there before the batch is trained on; of the two after it one is replaced by another.
    assert eventually(lambda: before.rollouts.metrics()["schedule/groups_waiting"] == 4)
    state = json.loads(json.dumps(before.rollouts.save(at_once(tmp_path))))
    after = ahead_and_dropping(scorer, *DROPS_THE_FIFTH)
    after.sampler.load_state_dict(state["sampler"])
    after.rollouts.load(tmp_path, state)
    steps = [of_steps(each, 2) for each in (before, after)]
    assert steps[0] == steps[1]
    (first, of_first), (second, of_second) = steps[1]
    assert [group.ordinal for group in first.sampled] == [2, 3]
    assert [group.ordinal for group in second.sampled] == [4, 5, 6]
    assert (of_first, of_second) == ([0, 0], [1, 0])


class WithExperts(Answers):
    """Says which experts the prompt's token and the response's went to."""

    def turns(self, requests):
        for turns in super().turns(requests):
            yield [replace(turn, routed_experts=(np.zeros(2, "V4"),)) for turn in turns]


def test_a_dropped_group_keeps_no_experts_of_its_tokens(scorer, tmp_path) -> None:
    ahead = ScheduleConfig(max_staleness=1)
    dropping = {"dynamic_sampling": True, "advantage": "remax"}
    job = job_of(scorer, WithExperts(*DROPS_THE_FIFTH), prompts_per_step=2, schedule=ahead, **dropping)
    sample(job, Clock())
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 4)
    state = job.rollouts.save(at_once(tmp_path))
    turns = {
        each["ordinal"]: [turn for member in each["members"] for turn in member["turns"]] for each in state["groups"]
    }
    with_experts = {ordinal: {is_with for *_, is_with in own} for ordinal, own in turns.items()}
    assert with_experts == {2: {True}, 3: {True}, 4: {False}, 5: {True}, 6: {True}}
    assert len(turns[4]) == 3, "two responses and the greedy one"


def test_lengths_and_what_was_dropped_and_why_go_on_from_a_checkpoint(tmp_path) -> None:
    def job(scorer):
        # No version is too old: the answers are of version 0.
        ahead = ScheduleConfig(max_staleness=3)
        texts = ["01", "00", "01", "xx", "x0", "01", "00", "01", "01", "01"]
        made = job_of(scorer, OfLengths(*texts), prompts_per_step=2, schedule=ahead, dynamic_sampling=True)
        made.config.loop.steps = 3
        return made

    def rest(job):
        found = []
        while not found or job.rollouts.metrics()["schedule/groups_waiting"]:
            ordinals = [group.ordinal for group in sample(job, Clock()).groups]
            assert eventually(lambda: job.rollouts.metrics()["schedule/groups_in_flight"] == 0)
            found.append((ordinals, job.rollouts.metrics()))
        return found

    with Scorer(RewardConfig(function=NUMBER, on_error="drop")) as scorer:
        before = job(scorer)
        sample(before, Clock())
        assert eventually(lambda: before.rollouts.metrics()["schedule/groups_in_flight"] == 0)
        state = json.loads(json.dumps(before.rollouts.save(at_once(tmp_path))))
        after = job(scorer)
        after.sampler.load_state_dict(state["sampler"])
        after.rollouts.load(tmp_path, state)
        expected = rest(before)
        assert rest(after) == expected
    (second, of_second), (third, of_third) = expected
    # One response to the fifth prompt has a score, and none differs from it.
    assert (second, third) == ([5, 7], [8, 9])
    assert [of_second[f"schedule/dropped_{why}"] for why in ("unscored", "equal")] == [1, 2]
    assert [of_third[f"schedule/dropped_{why}"] for why in ("unscored", "equal")] == [0, 0]
    assert of_third["schedule/length_sampled"] == sum(range(1, 11)) / 10
    assert of_third["schedule/length_trained"] == (1 + 3 + 6 + 8 + 9 + 10) / 6


def test_too_many_drops_end_a_run_in_the_step_that_they_are_for(scorer) -> None:
    job = ahead_and_dropping(scorer, *["01"] * 4, *["00"] * 6, max_refills=1)
    # While the first batch is trained on there is nothing but drops behind the second.
    sample(job, Clock())
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_in_flight"] == 0)
    assert job.sampler.drawn <= 9, "no draw can help any more"
    assert [group.ordinal for group in sample(job, Clock()).sampled] == [2, 3]
    with pytest.raises(UserError, match="of 3 prompts only 0 of the 2 of a step"):
        sample(job, Clock())


def test_a_replacement_without_a_score_is_no_work_for_the_reward_model() -> None:
    model = TenTimesTheToken()
    with Scorer(RewardConfig(function=NUMBER, on_error="drop")) as scorer:
        engines = Answers("01", "00", "xx", *["01"] * 7)
        dropping = {"dynamic_sampling": True, "filter_on": "reward"}
        taken = sample(job_of(scorer, engines, reward_model=model, prompts_per_step=2, **dropping), Clock())
    assert [group.ordinal for group in taken.groups] == [0, 3]
    assert [group.ordinal for group in taken.sampled] == [0, 1, 2, 3]
    assert len(model.together) == 2


def test_a_batch_without_any_score_says_so_where_there_is_a_reward_model() -> None:
    with Scorer(RewardConfig(function=NUMBER, on_error="drop")) as scorer:
        job = job_of(scorer, Answers(*["xx"] * 10), reward_model=TenTimesTheToken(), prompts_per_step=2)
        with pytest.raises(UserError, match="the reward function failed for all 4 responses"):
            sample(job, Clock())
