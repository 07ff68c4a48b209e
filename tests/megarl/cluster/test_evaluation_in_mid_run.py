"""An evaluation while the responses of later batches are in flight."""

from dataclasses import replace
from pathlib import Path

import pytest
from eventually import eventually
from patient_engine import PROMPTS, TOLD
from test_engines_go_on import PATIENT, REWARD, SAMPLES, STALENESS, STEPS, heard, rollouts_of

import megarl.rollout
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, engine_role
from megarl.data import Prompt, PromptSampler
from megarl.data.stretches import fetch
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import Scorer
from megarl.schema import ClusterConfig, LoopConfig, MegarlConfig, RewardConfig, RolloutConfig, ScheduleConfig
from megarl.stages.evaluate import EvalSettings, evaluate
from megarl.tracking.clock import Clock

HELD_OUT = [Prompt(place, "any", [place, 5], "truth", {}) for place in range(2)]
LASTING = replace(PATIENT, title="Lasting", engine_class=("patient_engine", "LastingEngine"))


@pytest.mark.usefixtures("shared_cluster")
def test_an_evaluation_is_of_one_version_and_loses_nothing_that_is_in_flight(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(megarl.rollout.ENGINES, "lasting", LASTING)
    config = MegarlConfig(
        loop=LoopConfig(steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES),
        schedule=ScheduleConfig(max_staleness=STALENESS, in_flight="recompute"),
        rollout=RolloutConfig(engine="lasting", max_response_tokens=32, replicas=2),
    )
    with (
        Scorer(RewardConfig(function=REWARD)) as scorer,
        reserve([engine_role(ClusterConfig(), config.rollout)], ClusterConfig()) as seats,
        EngineGroup(config.rollout, seats[ENGINE], tmp_path) as engines,
    ):
        engines.wait_started(engines.begin_start(Path("model"), load_weights=True))
        evaluated = note_answers(engines, monkeypatch)
        rollouts = rollouts_of(config, engines, scorer, PromptSampler(100, shuffle=False, seed=0))
        trained = []
        for version in range(1, STEPS + 1):
            trained += rollouts.take(Clock()).groups
            engines.begin_update(version, [], timeout_s=60)
            engines.commit_update(version, timeout_s=60)
            rollouts.note_refit()
            in_flight = those_of(range((version + 1) * PROMPTS, min(version + 1 + STALENESS, STEPS) * PROMPTS))
            assert eventually(lambda due=in_flight: heard(rollouts) == due), heard(rollouts)
            asked = set(engines._queue._pending)
            assert len(asked) == len(in_flight)
            evaluate(engines, HELD_OUT, scorer, make_tokenizer(), EvalSettings(32, ()))
            assert {each for turn in evaluated for each in fetch(turn.versions).tolist()} == {version}
            assert len(evaluated) == len(HELD_OUT)
            assert (set(engines._queue._pending), heard(rollouts)) == (asked, in_flight)
            evaluated.clear()
    assert [group.ordinal for group in trained] == list(range(STEPS * PROMPTS))
    for group in trained:
        for member in group.members:
            assert fetch(member.turns[0].prompt_ids).tolist() == [group.ordinal, 9]
            assert member.turns[0].finish_reason == "stop"


def note_answers(engines, monkeypatch):
    """The turns that the engines give to those who ask for them at once, which here is an evaluation alone."""
    noted, generate_each = [], engines.generate_each

    def note(requests):
        for place, turns in generate_each(requests):
            noted.extend(turns)
            yield place, turns

    monkeypatch.setattr(engines, "generate_each", note)
    return noted


def those_of(draws):
    """The parts of draws that are not due: some tokens of each sample."""
    return {draw: [dict.fromkeys(range(SAMPLES), TOLD)] for draw in draws}
