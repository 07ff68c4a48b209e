"""Checkpoints of what was sampled and waits for its batch, and runs that go on from them under another schedule."""

import json
import os
from threading import Event, Thread

import pytest
from eventually import eventually
from sampling_job import WHEN_ALLOWED, Answers, job_of, sample

from converters.errors import UserError
from megarl.rewards import Scorer
from megarl.run.checkpoint_files import at_once
from megarl.schema import RewardConfig, ScheduleConfig
from megarl.tracking.clock import Clock


def test_groups_that_wait_are_in_a_checkpoint_and_what_was_sampled_is_sampled_anew(scorer, tmp_path) -> None:
    ahead = ScheduleConfig(max_staleness=1)
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ahead, advantage="remax")
    job.rollouts.take(Clock())
    job.rollouts.drain()
    job.engines.answering.clear()
    job.rollouts.note_refit()
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 2)
    before = job.rollouts.save(at_once(tmp_path))
    job.engines.answering.set()
    expected = [sample(job, Clock()) for _ in range(2)]
    again = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ahead, advantage="remax")
    again.sampler.load_state_dict(before["sampler"])
    again.rollouts.load(tmp_path, json.loads(json.dumps(before)))
    assert [sample(again, Clock()) for _ in range(2)] == expected
    resampled = [request.prompt_token_ids for request in again.engines.calls[0]]
    assert resampled == [[4], [5]] * 2
    assert [each["ordinal"] for each in before["groups"]] == [2, 3]
    synchronous = job_of(scorer, Answers(), prompts_per_step=2)
    with pytest.raises(UserError, match=r"4 prompts on their way, .* has room for 2: continue with max_staleness=1"):
        synchronous.rollouts.load(tmp_path, before)


@pytest.mark.parametrize("in_flight", ["wait", "recompute"])
def test_a_save_waits_for_no_reward_and_what_is_being_scored_is_scored_anew_behind_it(in_flight, tmp_path) -> None:
    allowed = Event()

    def job(scorer, *texts):
        ahead = ScheduleConfig(max_staleness=1, in_flight=in_flight)
        extra_info = {"is_allowed": allowed}
        made = job_of(scorer, Answers(*texts), prompts_per_step=2, schedule=ahead, extra_info=extra_info)
        made.config.loop.steps = 3
        return made

    def last_two(job):
        return [sample(job, Clock()) for _ in range(2)], job.rollouts._lengths

    with Scorer(RewardConfig(function=WHEN_ALLOWED)) as scorer:
        before = job(scorer, *["01"] * 10)
        allowed.set()
        before.rollouts.take(Clock())
        before.rollouts.drain()
        assert eventually(lambda: before.rollouts.metrics()["schedule/groups_waiting"] == 2)
        allowed.clear()
        before.rollouts.note_refit()
        assert eventually(lambda: before.rollouts._sampled == {4, 5})
        states = []
        saving = Thread(target=lambda: states.append(before.rollouts.save(at_once(tmp_path))), daemon=True)
        saving.start()
        saving.join(60)
        (state,) = json.loads(json.dumps(states))
        allowed.set()
        # Its engines would sample something else.
        after = job(scorer, *["23"] * 10)
        after.sampler.load_state_dict(state["sampler"])
        after.rollouts.load(tmp_path, state)
        assert last_two(after) == last_two(before)
        assert after.engines.calls[0] == []


class SlowToMerge(Answers):
    """Takes time to say what there is of responses, which a save asks for when it has copied all else."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.is_asked, self.merging = Event(), Event()

    def partial_turns(self, asked):
        self.is_asked.set()
        assert self.merging.wait(60)
        return super().partial_turns(asked)


@pytest.mark.parametrize(("hangs", "in_flight"), [("merging", "recompute"), ("writing", "wait")])
def test_a_save_that_takes_long_holds_up_nothing_and_is_of_its_beginning(hangs, in_flight, scorer, tmp_path) -> None:
    def job():
        ahead = ScheduleConfig(max_staleness=1, in_flight=in_flight)
        return job_of(scorer, SlowToMerge(*["01"] * 10), prompts_per_step=2, schedule=ahead)

    def waiting(groups):
        return eventually(lambda: before.rollouts.metrics()["schedule/groups_waiting"] == groups)

    before = job()
    before.rollouts.take(Clock())
    before.rollouts.drain()
    before.engines.answering.clear()
    before.rollouts.note_refit()
    assert waiting(2)
    if hangs == "writing":
        before.engines.merging.set()
    # Whoever opens a pipe to write waits until somebody reads.
    file, states = tmp_path / "groups.safetensors", []
    os.mkfifo(file)
    saving = Thread(target=lambda: states.append(before.rollouts.save(at_once(tmp_path))), daemon=True)
    saving.start()
    assert before.engines.is_asked.wait(60)
    before.engines.answering.set()
    seen = []
    seeing = Thread(target=lambda: seen.append(waiting(4)), daemon=True)
    seeing.start()
    seeing.join(60)
    assert (seen, saving.is_alive()) == ([True], True)
    before.engines.merging.set()
    written = file.read_bytes()
    saving.join(60)
    file.unlink()
    file.write_bytes(written)
    (state,) = json.loads(json.dumps(states))
    assert [each["ordinal"] for each in state["groups"]] == [2, 3]
    after = job()
    after.sampler.load_state_dict(state["sampler"])
    after.rollouts.load(tmp_path, state)
    assert [sample(after, Clock()) for _ in range(2)] == [sample(before, Clock()) for _ in range(2)]


def four_ahead(scorer, staleness, prompts, in_flight="recompute"):
    ahead = ScheduleConfig(max_staleness=staleness, in_flight=in_flight)
    return job_of(scorer, Answers(*["01"] * 10), prompts_per_step=prompts, schedule=ahead)


@pytest.fixture
def saved_four_ahead(scorer, tmp_path):
    """State of a run of two prompts a step that trains on tokens of four versions ago."""
    job = four_ahead(scorer, 4, 2)
    for _ in range(4):
        sample(job, Clock())
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 10)
    return json.loads(json.dumps(job.rollouts.save(at_once(tmp_path))))


def test_a_schedule_that_would_train_on_older_tokens_than_it_allows_is_refused(
    scorer, saved_four_ahead, tmp_path
) -> None:
    why = r" \(schedule.max_staleness=2, was 4; loop.prompts_per_step=4, was 2 in the che.*\)"
    # There are slots for its ten draws.
    again = four_ahead(scorer, 2, 4)
    refused = rf"may be 4 versions old .*, and this run allows 2{why}: continue with schedule.max_staleness=4 or more"
    with pytest.raises(UserError, match=refused):
        again.rollouts.load(tmp_path, saved_four_ahead)


def test_what_a_checkpoint_of_another_schedule_has_carries_over_where_it_fits(
    scorer, saved_four_ahead, tmp_path, capsys
) -> None:
    again = four_ahead(scorer, 4, 4, "wait")
    again.sampler.load_state_dict(saved_four_ahead["sampler"])
    again.rollouts.load(tmp_path, saved_four_ahead)
    assert capsys.readouterr().out == (
        "another schedule than that of the checkpoint (loop.prompts_per_step=4, was 2; schedule.in_flight=wait, was "
        "recompute): the 10 groups that wait and the 0 that were being sampled carry over, and come first\n"
    )
    assert [[group.ordinal for group in sample(again, Clock()).groups] for _ in range(3)] == [
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
