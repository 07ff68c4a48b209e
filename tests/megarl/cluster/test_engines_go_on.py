"""A run that is saved and killed after every step: responses in flight go on behind their tokens, and none is lost."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from echo_kind import ECHO
from eventually import eventually
from patient_engine import PROMPTS, TOLD, log_prob, response

import megarl.rollout
from megarl.cluster.colocation import OwnGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, engine_role
from megarl.data import Prompt, PromptSampler
from megarl.data.stretches import fetch
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.rewards import Scorer
from megarl.rollout.kind import EngineSizes
from megarl.run.checkpoint_files import at_once
from megarl.run.rollouts import Rollouts, RolloutWorkers
from megarl.run.schedule import Schedule
from megarl.schema import (
    AlgorithmConfig,
    ClusterConfig,
    LoopConfig,
    MegarlConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
)
from megarl.tracking.clock import Clock

STALENESS, STEPS, SAMPLES = 2, 5, 2
REWARD = f"{Path(__file__).parents[1] / 'reward_functions.py'}:as_length"
PATIENT = replace(
    ECHO,
    title="Patient",
    engine_class=("patient_engine", "PatientEngine"),
    sizes=lambda _arguments: EngineSizes(1, None, "bf16"),
    workers=lambda _arguments: 1,
    part_class=None,
)


@pytest.mark.usefixtures("shared_cluster")
def test_partials_go_on_behind_their_tokens_and_each_draw_is_trained_on_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(megarl.rollout.ENGINES, "patient", PATIENT)
    config = MegarlConfig(
        algorithm=AlgorithmConfig(advantage="remax"),
        loop=LoopConfig(steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES),
        schedule=ScheduleConfig(max_staleness=STALENESS, in_flight="recompute"),
        rollout=RolloutConfig(engine="patient", max_response_tokens=32),
    )
    with (
        Scorer(RewardConfig(function=REWARD)) as scorer,
        reserve([engine_role(ClusterConfig(), config.rollout)], ClusterConfig()) as seats,
        EngineGroup(config.rollout, seats[ENGINE], tmp_path) as engines,
    ):
        engines.wait_started(engines.begin_start(Path("model"), load_weights=True))
        trained = steps_of_runs(config, engines, scorer, tmp_path)
    assert [group.ordinal for group in trained] == list(range(STEPS * PROMPTS))
    for group in trained:
        members = [*((sample, False) for sample in range(SAMPLES)), (0, True)]
        for (sample, is_greedy), member in zip(members, group.members, strict=True):
            check_turn(member.turns[0], group.ordinal, response(group.ordinal, sample, is_greedy))


def steps_of_runs(config, engines, scorer, folder):
    """The groups of all steps, each step in a run of its own, which begins where the one before was saved."""
    trained, told, state = [], Counter(), None
    for version in range(STEPS):
        sampler = PromptSampler(100, shuffle=False, seed=0)
        rollouts = rollouts_of(config, engines, scorer, sampler)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            rollouts.load(folder / str(version), state)
            # Saved again before anything is asked for, it is the same.
            again = folder / f"{version} again"
            again.mkdir()
            assert as_read(rollouts.save(at_once(again))) == state
        trained += rollouts.take(Clock()).groups
        engines.begin_update(version + 1, [], timeout_s=60)
        engines.commit_update(version + 1, timeout_s=60)
        rollouts.note_refit()
        first, begun, end = (min(version + ahead, STEPS) * PROMPTS for ahead in (1, 1 + STALENESS, 2 + STALENESS))
        told.update(dict.fromkeys(range(first, begun), TOLD))
        told.update(dict.fromkeys(range(begun, end), TOLD))
        assert eventually(lambda run=rollouts, first=first: heard(run) == only_from(first, told)), heard(rollouts)
        target = folder / str(version + 1)
        target.mkdir()
        state = as_read(rollouts.save(at_once(target)))
    return trained


def as_read(state):
    return json.loads(json.dumps(state))


def only_from(first, told):
    return {draw: [dict.fromkeys(range(SAMPLES), count), {0: count}] for draw, count in told.items() if draw >= first}


def heard(rollouts):
    """How many tokens there are of each sample, by draw and request."""
    return {
        draw: [{sample: len(turn.token_ids) for sample, turn in each.turns.items()} for each in own]
        for draw, own in rollouts._in_flight.partials().items()
    }


def rollouts_of(config, engines, scorer, sampler, gpus=None):
    prompts = [Prompt(index, "any", [index, 9], "truth", {}) for index in range(100)]
    by = RolloutWorkers(engines, scorer, None, gpus or OwnGpus(), make_tokenizer(), ())
    return Rollouts(config, prompts, sampler, Schedule(PROMPTS, STALENESS), by)


def check_turn(turn, draw, expected):
    """Check that it is the whole response, sampled from the time of its draw on by whatever weights there were."""
    batch, versions = draw // PROMPTS, fetch(turn.versions).tolist()
    assert fetch(turn.prompt_ids).tolist() == [draw, 9]
    assert fetch(turn.token_ids).tolist() == expected
    assert fetch(turn.log_probs).tolist() == [log_prob(*each) for each in enumerate(versions)]
    assert versions == sorted(versions)
    assert set(versions) == set(range(max(0, batch - STALENESS), batch + 1))
