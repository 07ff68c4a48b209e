"""Engines that sample while a batch is trained on: whose turn it is, what is drawn, how old a token may be."""

from threading import Thread

import pytest
from eventually import eventually
from sampling_job import Answers, Holding, RecordedGpus, TenTimesTheToken, job_of, sample

from megarl.rewards import RewardFailed
from megarl.schema import ScheduleConfig
from megarl.tracking.clock import Clock


def test_the_next_batch_is_sampled_while_this_one_is_trained_on_and_both_are_those_of_their_draws(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ScheduleConfig(max_staleness=1))
    job.config.loop.steps = 3
    assert [group.ordinal for group in job.rollouts.take(Clock()).groups] == [0, 1]
    assert [len(call) for call in job.engines.calls] == [4]
    job.rollouts.drain()
    job.rollouts.note_refit()
    assert [len(call) for call in job.engines.calls] == [4, 2]
    metrics = job.rollouts.metrics()
    assert metrics["schedule/groups_in_flight"] + metrics["schedule/groups_waiting"] == 4
    assert [group.ordinal for group in sample(job, Clock()).groups] == [2, 3]
    assert [group.ordinal for group in sample(job, Clock()).groups] == [4, 5]
    # Nothing is sampled that no step needs.
    assert job.sampler.drawn == 6


@pytest.mark.parametrize("in_flight", ["wait", "recompute"])
def test_the_engines_turn_ends_with_the_batch_or_with_all_that_has_to_end(scorer, in_flight) -> None:
    ahead, gpus = ScheduleConfig(max_staleness=1, in_flight=in_flight), RecordedGpus()
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ahead, gpus=gpus)
    assert [group.ordinal for group in job.rollouts.take(Clock()).groups] == [0, 1]
    job.rollouts.drain()
    job.engines.answering.clear()
    job.rollouts.note_refit()
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 2)
    gpus.given.clear()
    taken = []
    taking = Thread(target=lambda: taken.append(job.rollouts.take(Clock())))
    taking.start()
    if in_flight == "wait":
        assert eventually(lambda: gpus.given == [job.engines])
        assert taking.is_alive()
        job.engines.answering.set()
    taking.join(60)
    assert [group.ordinal for group in taken[0].groups] == [2, 3]
    if in_flight == "recompute":
        # The next batch was there: nobody had to wait for the rest.
        assert gpus.given == []
        assert job.rollouts.metrics()["schedule/groups_in_flight"] == 2
        job.engines.answering.set()


def test_what_no_engine_with_the_old_weights_is_left_for_is_not_waited_for(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ScheduleConfig(max_staleness=1))
    assert [group.ordinal for group in sample(job, Clock()).groups] == [0, 1]
    job.engines.answering.clear()
    job.rollouts.take(Clock())
    job.rollouts.note_refit()
    draining = Thread(target=job.rollouts.drain)
    draining.start()
    draining.join(0.5)
    assert draining.is_alive()
    job.engines.any_serving = False
    draining.join(60)
    assert not draining.is_alive()
    assert job.rollouts.metrics()["schedule/groups_in_flight"] > 0
    job.engines.answering.set()


def test_engines_that_have_answered_all_of_a_batch_get_no_turn_before_the_reward_model(scorer) -> None:
    ahead, gpus, model = ScheduleConfig(max_staleness=1), RecordedGpus(), TenTimesTheToken()
    job = job_of(scorer, Answers(*["01"] * 10), reward_model=model, prompts_per_step=2, schedule=ahead, gpus=gpus)
    sample(job, Clock())
    gpus.given.clear()
    assert [group.ordinal for group in sample(job, Clock()).groups] == [2, 3]
    assert gpus.given[0] == model


@pytest.mark.parametrize("in_flight", ["wait", "recompute"])
@pytest.mark.parametrize("model", [None, TenTimesTheToken()])
def test_a_window_leaves_behind_what_is_being_sampled_with_a_reward_model_too(scorer, model, in_flight) -> None:
    engines = Holding(*["01"] * 10, held=[0, 3])
    ahead = ScheduleConfig(max_staleness=1, window=3, in_flight=in_flight)
    job = job_of(scorer, engines, reward_model=model, prompts_per_step=2, schedule=ahead)
    taken = []
    taking = Thread(target=lambda: taken.append(job.rollouts.take(Clock())))
    taking.start()
    taking.join(60)
    engines.released.set()
    assert [[group.ordinal for group in each.groups] for each in taken] == [[1, 2]]
    job.rollouts.drain()
    job.rollouts.note_refit()
    assert sample(job, Clock()).groups[0].ordinal == 0, "two have overtaken it, and no third may"


def test_a_token_that_is_too_old_is_named_and_not_trained_on(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2)
    job.engines.version = lambda: 0
    sample(job, Clock())
    with pytest.raises(RuntimeError, match=r"draw 2 has tokens of version 0, 1 versions older than the 1 .* allows 0"):
        sample(job, Clock())


def test_a_reward_that_fails_in_the_background_is_raised_where_a_batch_is_taken(scorer) -> None:
    job = job_of(scorer, Answers("0x", "01", "01", "01"), prompts_per_step=2, schedule=ScheduleConfig(max_staleness=1))
    with pytest.raises(RewardFailed, match="the reward function failed"):
        sample(job, Clock())
