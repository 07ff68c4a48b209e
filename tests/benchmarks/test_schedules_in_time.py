"""Schedules in virtual time: what is trained on is what was drawn, no bound is passed, and sampling ahead pays."""

import pytest
from schedules import OTHERS, Simulation, Workload, rollout_seconds, rules

STEPS = 24
GAINS = {"S=1": 1.7, "S=2": 2.3}
"""Steps a second of the synchronous schedule, at least, where training takes half as long as a rollout."""


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload(sigma=1.0)


@pytest.fixture(scope="module")
def train_s(work: Workload) -> float:
    return 0.5 * rollout_seconds(work, STEPS)


@pytest.mark.parametrize("name", [name for name in rules(32) if not name.startswith(OTHERS)])
def test_a_schedule_trains_on_the_lengths_that_were_drawn(name: str, work: Workload, train_s: float) -> None:
    compared = rules(work.prompts)[name]
    outcome = Simulation(compared, work, train_s).run(STEPS)
    # With a window the last batch may leave draws behind.
    assert outcome.trained_tokens / outcome.drawn_tokens == pytest.approx(1.0, abs=0.01 if "window" in name else 1e-9)
    assert outcome.oldest <= compared.rule.staleness_bound


@pytest.mark.parametrize("name", ["discard what is old, 2", "over-sample by half"])
def test_who_throws_away_trains_on_short_responses(name: str, work: Workload, train_s: float) -> None:
    outcome = Simulation(rules(work.prompts)[name], work, train_s).run(STEPS)
    assert outcome.trained_tokens / outcome.drawn_tokens < 0.9


@pytest.mark.parametrize("name", list(GAINS))
def test_sampling_ahead_pays(name: str, work: Workload, train_s: float) -> None:
    compared = rules(work.prompts)
    alone, ahead = (Simulation(compared[each], work, train_s).run(STEPS).step_s for each in ("S=0, synchronous", name))
    assert alone / ahead >= GAINS[name]
