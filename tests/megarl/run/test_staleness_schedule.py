"""Schedules: driven through any arrivals, filters and restarts, they keep their bound and lose nothing."""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.run.schedule import Schedule


@dataclass
class Run:
    """A run that obeys a schedule, and remembers the version under which each prompt was admitted."""

    schedule: Schedule
    drawn: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)

    def admit(self) -> None:
        count = self.schedule.admissible
        ordinals = list(range(self.drawn, self.drawn + count))
        self.schedule.admit(ordinals)
        self.drawn += count
        self.admitted |= dict.fromkeys(ordinals, self.schedule.version)

    def train(self) -> None:
        batch = self.schedule.take()
        self.trained.append(batch)
        self.schedule.release()

    def restart(self) -> None:
        """Everything that was being sampled is lost, and sampled again with the weights of now."""
        kept = copy.deepcopy(self.schedule.state_dict())
        self.schedule = Schedule(self.schedule._batch, self.schedule._staleness, self.schedule._window)
        self.schedule.load_state_dict(kept)
        self.admitted |= dict.fromkeys(self.schedule.unfinished, self.schedule.version)


def by_the_rule(schedule: Schedule) -> list[int] | None:
    """The first finished draws, unless one that is left behind would be overtaken by as many as the window has."""
    draws = schedule._draws.values()
    batch = [draw.ordinal for draw in draws if draw.is_finished][: schedule._batch]
    if len(batch) < schedule._batch:
        return None
    left_behind = [draw for draw in draws if not draw.is_finished and draw.ordinal < batch[-1]]
    counts = [draw.overtaken + sum(draw.ordinal < each for each in batch) for draw in left_behind]
    return batch if max(counts, default=0) < schedule._window else None


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.integers(1, 6),
    staleness=st.integers(0, 3),
    window=st.integers(1, 9),
    choices=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**6)), min_size=40, max_size=120),
)
def test_every_run_keeps_the_bound_and_loses_nothing(prompts, staleness, window, choices):
    run = Run(Schedule(prompts, staleness, window))
    for kind, number in choices:
        run.admit()
        if unfinished := run.schedule.unfinished:
            chosen = unfinished[number % len(unfinished)]
            if kind == 0:
                run.schedule.drop(chosen)
                run.dropped.append(chosen)
            else:
                run.schedule.finish(chosen)
        if kind == 1:
            run.restart()
        assert run.schedule.takeable() == by_the_rule(run.schedule)
        bound, latest = run.schedule.staleness_bound, run.schedule.latest_versions()
        assert all(version - run.admitted[ordinal] <= bound for ordinal, version in latest.items())
        if kind > 3 and run.schedule.takeable() is not None:
            run.train()
    while len(run.trained) < 4 + len(choices) // prompts:
        run.admit()
        for ordinal in run.schedule.unfinished:
            run.schedule.finish(ordinal)
        run.train()

    seen = [ordinal for batch in run.trained for ordinal in batch]
    assert len(seen) == len(set(seen))
    assert not set(seen) & set(run.dropped)
    held = {draw.ordinal for draw in run.schedule._draws.values()}
    assert sorted({*seen, *run.dropped, *held}) == list(range(run.drawn))
    for version, batch in enumerate(run.trained):
        assert len(batch) == prompts
        assert batch == sorted(batch)
        assert all(version - run.admitted[ordinal] <= run.schedule.staleness_bound for ordinal in batch)
    if window == 1:
        assert seen == sorted(seen)


schedules = st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(1, 9))


@settings(max_examples=300, deadline=None)
@given(before=schedules, after=schedules, choices=st.lists(st.integers(0, 9), min_size=10, max_size=60))
def test_a_run_that_goes_on_with_another_schedule_trains_its_draws_no_later_than_that_says(before, after, choices):
    run = Run(Schedule(*before))
    for kind in choices:
        run.admit()
        if unfinished := run.schedule.unfinished:
            run.schedule.finish(unfinished[kind % len(unfinished)])
        if run.schedule.takeable() is not None:
            run.train()
    state, changed = run.schedule.state_dict(), Schedule(*after)
    if len(state["draws"]) > changed.slots:
        return
    changed.load_state_dict(state)
    run.schedule, latest = changed, changed.latest_versions()
    while not latest.keys() <= {ordinal for batch in run.trained for ordinal in batch}:
        run.admit()
        version, late = changed.version, [ordinal for ordinal in changed.unfinished if ordinal in latest]
        # Later draws are finished first, as long as there are any.
        for ordinal in [each for each in changed.unfinished if each not in late] or late[:1]:
            changed.finish(ordinal)
        if changed.takeable() is not None:
            run.train()
            assert all(version <= latest.get(each, version) for each in run.trained[-1])


def test_the_bound_is_reached_and_so_no_looser_one_is_needed():
    schedule = Schedule(2, max_staleness=1, window=3)
    schedule.admit([0, 1, 2, 3])
    for ordinal in (1, 2):
        schedule.finish(ordinal)
    assert schedule.take() == [1, 2]
    schedule.release()
    schedule.admit([4, 5])
    schedule.finish(3)
    schedule.finish(4)
    assert schedule.takeable() is None, "draw 0 is overtaken by two, and would be by a third and a fourth"
    schedule.finish(0)
    assert schedule.take() == [0, 3]


@pytest.mark.parametrize(("staleness", "admissible"), [(0, 3), (1, 6), (2, 9)])
def test_slots_are_for_the_batches_that_may_be_ahead(staleness, admissible):
    assert Schedule(3, staleness).admissible == admissible


def test_a_slot_is_free_when_its_group_is_trained_and_not_when_it_is_finished():
    schedule = Schedule(2)
    schedule.admit([0, 1])
    schedule.finish(0)
    schedule.finish(1)
    assert schedule.admissible == 0
    schedule.take()
    assert schedule.admissible == 0
    schedule.release()
    assert (schedule.admissible, schedule.version) == (2, 1)


def test_what_a_schedule_is_told_twice_or_out_of_turn_is_an_error():
    schedule = Schedule(2)
    schedule.admit([4])
    with pytest.raises(ValueError, match="draw 4 is admitted after 4"):
        schedule.admit([4])
    with pytest.raises(ValueError, match="2 draws for 1 free slots"):
        schedule.admit([5, 6])
    with pytest.raises(ValueError, match="draw 7 is not being sampled"):
        schedule.finish(7)
    with pytest.raises(ValueError, match="no batch is finished"):
        schedule.take()
    schedule.admit([5])
    schedule.finish(4)
    with pytest.raises(ValueError, match="draw 4 is not being sampled"):
        schedule.drop(4)
    schedule.finish(5)
    schedule.take()
    with pytest.raises(ValueError, match="not this one"):
        schedule.state_dict()
    with pytest.raises(ValueError, match="5 draws for 2 slots"):
        schedule.load_state_dict({"version": 0, "last": 4, "draws": [{"ordinal": n} for n in range(5)]})
