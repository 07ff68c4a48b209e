"""From drawn prompts to the groups of a step: who is asked for what, how often, and with which seeds."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from eventually import eventually

from converters.errors import UserError
from megarl.cluster.asked import SoFar
from megarl.cluster.batch import opened_values
from megarl.cluster.turns import Turns
from megarl.data import Prompt, PromptSampler, Turn
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import RewardFailed, Scorer
from megarl.rollout.protocol import Request
from megarl.rollout.schedule import Schedule
from megarl.run.rollouts import Rollouts, Served
from megarl.schema import AlgorithmConfig, LoopConfig, MegarlConfig, RewardConfig, ScheduleConfig
from megarl.stages.rollout import sampling_parameters
from megarl.tracking.clock import Clock

TOKENIZER = make_tokenizer()
# An async one: no process has to start.
NUMBER, WHEN_ALLOWED = (
    f"{Path(__file__).parent / 'reward_functions.py'}:{name}" for name in ("as_number_later", "when_allowed")
)


class Answers:
    """Answers the prompt [n] with the texts of place n, the last request first; with 2 where it is greedy."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.calls: list[list[Request]] = []
        self.version: Callable[[], int] = lambda: 0
        self.answering = Event()
        self.answering.set()

    def begin_generate(self, requests: Sequence[Request], so_far: Sequence[SoFar]) -> list[SimpleNamespace]:
        self.calls.append([request for request, there in zip(requests, so_far, strict=True) if not there])
        asked = [SimpleNamespace(request=request, answer=Future()) for request in requests]
        for each, there in zip(asked, so_far, strict=True):
            if there:
                each.answer.set_result(list(there.values()))
        left = [each for each in asked if not each.answer.done()]
        answers = reversed(list(zip(left, self.turns([each.request for each in left]), strict=True)))
        Thread(target=self.answer, args=(list(answers),)).start()
        return asked

    def answer(self, answers: Sequence[tuple[SimpleNamespace, list[Turn]]]) -> None:
        assert self.answering.wait(60)
        for each, turns in answers:
            each.answer.set_result(turns)

    def so_far(self, asked: Sequence[SimpleNamespace]) -> list[SoFar]:
        return [dict(enumerate(each.answer.result())) if each.answer.done() else {} for each in asked]

    def look_after(self) -> None:
        pass

    def turns(self, requests: Sequence[Request]) -> Iterator[list[Turn]]:
        for request in requests:
            greedy = request.sampling.temperature == 0
            digits = "2" if greedy else self.texts[request.prompt_token_ids[0]]
            assert len(digits) == request.sampling.samples
            tokens = [TOKENIZER(digit).input_ids for digit in digits]
            yield [Turn.of(request.prompt_token_ids, (one,), (-0.1,), (self.version(),), "stop") for (one,) in tokens]


class Holding(Answers):
    """Answers some prompts only when it may."""

    def __init__(self, *texts: str, held: Sequence[int]) -> None:
        super().__init__(*texts)
        self.held = held
        self.released = Event()

    def answer(self, answers: Sequence[tuple[SimpleNamespace, list[Turn]]]) -> None:
        late = [each for each in answers if each[0].request.prompt_token_ids[0] in self.held]
        super().answer([each for each in answers if each not in late])
        assert self.released.wait(60)
        super().answer(late)


class TenTimesTheToken:
    """A reward model: ten times the digit that a response is."""

    def __init__(self) -> None:
        self.together: list[list[int]] = []

    def scores(self, batch):
        self.together.append(opened_values(batch.tokens).tolist())
        last = opened_values(batch.tokens)[batch.lengths.cumsum() - 1].tolist()
        return torch.tensor([10.0 * float(TOKENIZER.decode(token)) for token in last])


@pytest.fixture(scope="module")
def scorer():
    with Scorer(RewardConfig(function=NUMBER, workers=2)) as scorer:
        yield scorer


class InTurns(Turns):
    """Notes who is given a turn."""

    are_taken = True

    def __init__(self):
        self.given = []

    def give_to(self, group):
        self.given.append(group)


def job_of(
    scorer, engines, *, reward_model=None, prompts_per_step=3, schedule=None, turns=None, extra_info=None, **algorithm
):
    """As much of a job as sampling asks for: ten prompts, drawn in their order."""
    config = MegarlConfig(
        algorithm=AlgorithmConfig(**algorithm),
        loop=LoopConfig(prompts_per_step=prompts_per_step, samples_per_prompt=2),
        schedule=schedule or ScheduleConfig(),
    )
    sampler = PromptSampler(10, shuffle=False, seed=0)
    prompts = [Prompt(index, "any", [index], "truth", extra_info or {}) for index in range(10)]
    schedule = Schedule(prompts_per_step, config.schedule.max_staleness, config.schedule.window)
    engines.version = lambda: schedule.version
    by = Served(engines, scorer, reward_model, turns or Turns(), TOKENIZER, ())
    rollouts = Rollouts(config, prompts, sampler, schedule, by)
    return SimpleNamespace(config=config, engines=engines, rollouts=rollouts, sampler=sampler)


def sample(job, clock):
    """Batch of a step, which then is trained on."""
    taken = job.rollouts.take(clock)
    job.rollouts.hold()
    job.rollouts.release()
    return taken


def test_one_rollout_gives_every_drawn_prompt_its_samples(scorer) -> None:
    job = job_of(scorer, Answers("10", "11", "00", "31"), prompts_per_step=2)
    for ordinals in ((0, 1), (2, 3)):
        sampled, groups, rollouts = sample(job, Clock())
        assert sampled == groups
        assert rollouts == 1
        assert [(group.ordinal, group.prompt.index) for group in groups] == [(each, each) for each in ordinals]
    assert [group.rewards for group in groups] == [[0, 0], [3, 1]]
    assert [each.turns[0].prompt_ids.tolist() for group in groups for each in group.trajectories] == [
        [2],
        [2],
        [3],
        [3],
    ]


def test_prompts_that_teach_nothing_are_replaced_by_as_many_others(scorer) -> None:
    job = job_of(scorer, Answers("00", "11", "01", "10", "00", "20"), dynamic_sampling=True)
    sampled, groups, rollouts = sample(job, Clock())
    metrics = job.rollouts.metrics()
    assert (metrics["schedule/dropped_equal"], metrics["schedule/dropped_unscored"]) == (3, 0)
    assert (metrics["schedule/length_sampled"], metrics["schedule/length_trained"]) == (1, 1)
    assert [len(call) for call in job.engines.calls] == [3, 1, 1, 1]
    assert [group.ordinal for group in groups] == [2, 3, 5]
    assert [group.rewards for group in groups] == [[0, 1], [1, 0], [2, 0]]
    assert [group.ordinal for group in sampled] == [0, 1, 2, 3, 4, 5]
    assert rollouts == 2
    assert len({request.sampling.seed for call in job.engines.calls for request in call}) == 6


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
    _, groups, _ = sample(job, Clock())
    assert [group.rewards for group in groups] == [[11, 0], [11, 11], [0, 0]]
    assert [group.baseline.reward for group in groups] == [22, 22, 22]
    ((*sampled, _, _, _),) = ([request.sampling.temperature for request in call] for call in job.engines.calls)
    assert sampled == [1, 1, 1]


def test_the_next_batch_is_sampled_while_this_one_is_trained_on_and_both_are_those_of_their_draws(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ScheduleConfig(max_staleness=1))
    job.config.loop.steps = 3
    assert [group.ordinal for group in job.rollouts.take(Clock()).groups] == [0, 1]
    assert [len(call) for call in job.engines.calls] == [4]
    job.rollouts.hold()
    job.rollouts.release()
    assert [len(call) for call in job.engines.calls] == [4, 2]
    metrics = job.rollouts.metrics()
    assert metrics["schedule/groups_in_flight"] + metrics["schedule/groups_waiting"] == 4
    assert [group.ordinal for group in sample(job, Clock()).groups] == [2, 3]
    assert [group.ordinal for group in sample(job, Clock()).groups] == [4, 5]
    # Nothing is sampled that no step needs.
    assert job.sampler.drawn == 6


@pytest.mark.parametrize("in_flight", ["wait", "recompute"])
def test_the_engines_turn_ends_with_the_batch_or_with_all_that_has_to_end(scorer, in_flight) -> None:
    ahead, turns = ScheduleConfig(max_staleness=1, in_flight=in_flight), InTurns()
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ahead, turns=turns)
    assert [group.ordinal for group in job.rollouts.take(Clock()).groups] == [0, 1]
    job.rollouts.hold()
    job.engines.answering.clear()
    job.rollouts.release()
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 2)
    turns.given.clear()
    taken = []
    taking = Thread(target=lambda: taken.append(job.rollouts.take(Clock())))
    taking.start()
    if in_flight == "wait":
        assert eventually(lambda: turns.given == [job.engines])
        assert taking.is_alive()
        job.engines.answering.set()
    taking.join(60)
    assert [group.ordinal for group in taken[0].groups] == [2, 3]
    if in_flight == "recompute":
        # The next batch was there: nobody had to wait for the rest.
        assert turns.given == []
        assert job.rollouts.metrics()["schedule/groups_in_flight"] == 2
        job.engines.answering.set()


def test_engines_that_have_answered_all_of_a_batch_get_no_turn_before_the_reward_model(scorer) -> None:
    ahead, turns, model = ScheduleConfig(max_staleness=1), InTurns(), TenTimesTheToken()
    job = job_of(scorer, Answers(*["01"] * 10), reward_model=model, prompts_per_step=2, schedule=ahead, turns=turns)
    sample(job, Clock())
    turns.given.clear()
    assert [group.ordinal for group in sample(job, Clock()).groups] == [2, 3]
    assert turns.given[0] == model


def test_groups_that_wait_are_in_a_checkpoint_and_what_was_sampled_is_sampled_anew(scorer, tmp_path) -> None:
    ahead = ScheduleConfig(max_staleness=1)
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2, schedule=ahead, advantage="remax")
    job.rollouts.take(Clock())
    job.rollouts.hold()
    job.engines.answering.clear()
    job.rollouts.release()
    assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 2)
    before = job.rollouts.save(tmp_path)
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
        before.rollouts.hold()
        assert eventually(lambda: before.rollouts.metrics()["schedule/groups_waiting"] == 2)
        allowed.clear()
        before.rollouts.release()
        assert eventually(lambda: before.rollouts._sampled == {4, 5})
        states = []
        saving = Thread(target=lambda: states.append(before.rollouts.save(tmp_path)), daemon=True)
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
    return json.loads(json.dumps(job.rollouts.save(tmp_path)))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_schedule_that_would_train_on_older_tokens_than_it_allows_is_refused(
    scorer, saved_four_ahead, tmp_path, is_old
) -> None:
    state, why = saved_four_ahead, r" \(schedule.max_staleness=2, was 4; loop.prompts_per_step=4, was 2 in the che.*\)"
    if is_old:
        del state["schedule"]["settings"]
        why = ""
    # There are slots for its ten draws.
    again = four_ahead(scorer, 2, 4)
    refused = rf"may be 4 versions old .*, and this run allows 2{why}: continue with schedule.max_staleness=4 or more"
    with pytest.raises(UserError, match=refused):
        again.rollouts.load(tmp_path, state)


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


def test_a_token_that_is_too_old_is_named_and_not_trained_on(scorer) -> None:
    job = job_of(scorer, Answers(*["01"] * 10), prompts_per_step=2)
    job.engines.version = lambda: 0
    sample(job, Clock())
    with pytest.raises(RuntimeError, match=r"draw 2 has tokens of version 0, 1 versions older than the 1 .* allows 0"):
        sample(job, Clock())


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
    job.rollouts.hold()
    job.engines.answering.clear()
    job.rollouts.release()
    if is_dropped_early:
        job.engines.answering.set()
        assert eventually(lambda: job.rollouts.metrics()["schedule/groups_waiting"] == 4)
    taken = job.rollouts.take(Clock())
    job.engines.answering.set()
    assert [group.ordinal for group in taken.sampled] == [2, 3]
    job.rollouts.hold()
    job.rollouts.release()
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
            assert eventually(lambda: {2, 3, 4, 5} <= job.rollouts._unjudged.keys())
            engines.released.set()
        taking.join(60)
        engines.released.set()
        job.rollouts.hold()
        job.rollouts.release()
        return [*first, *(sample(job, Clock()) for _ in range(3))], model.together

    far, near = run([0, 1]), run([2, 3, 4, 5])
    assert far == near
    assert [each.ordinal for each in far[0][2].sampled] == [4, 5, 6] if algorithm else [4, 5]


def test_groups_that_were_dropped_before_a_checkpoint_are_told_of_by_the_batch_behind_them(scorer, tmp_path) -> None:
    before = ahead_and_dropping(scorer, *DROPS_THE_FIFTH)
    sample(before, Clock())
    # Two draws are there before the batch is trained on; of the two after it one is replaced by another.
    assert eventually(lambda: before.rollouts.metrics()["schedule/groups_waiting"] == 4)
    state = json.loads(json.dumps(before.rollouts.save(tmp_path)))
    after = ahead_and_dropping(scorer, *DROPS_THE_FIFTH)
    after.sampler.load_state_dict(state["sampler"])
    after.rollouts.load(tmp_path, state)
    steps = [of_steps(each, 2) for each in (before, after)]
    assert steps[0] == steps[1]
    (first, of_first), (second, of_second) = steps[1]
    assert [group.ordinal for group in first.sampled] == [2, 3]
    assert [group.ordinal for group in second.sampled] == [4, 5, 6]
    assert (of_first, of_second) == ([0, 0], [1, 0])


class OfLengths(Answers):
    """Answers the prompt [n] with n tokens more than one."""

    def turns(self, requests: Sequence[Request]) -> Iterator[list[Turn]]:
        for request, turns in zip(requests, super().turns(requests), strict=True):
            (place,) = request.prompt_token_ids
            zeros = TOKENIZER("0").input_ids * place
            yield [
                Turn.of([place], [*zeros, *turn.token_ids.tolist()], [-0.1] * (place + 1), [0] * (place + 1), "stop")
                for turn in turns
            ]


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
        state = json.loads(json.dumps(before.rollouts.save(tmp_path)))
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


def test_a_reward_that_fails_in_the_background_is_raised_where_a_batch_is_taken(scorer) -> None:
    job = job_of(scorer, Answers("0x", "01", "01", "01"), prompts_per_step=2, schedule=ScheduleConfig(max_staleness=1))
    with pytest.raises(RewardFailed, match="the reward function failed"):
        sample(job, Clock())
