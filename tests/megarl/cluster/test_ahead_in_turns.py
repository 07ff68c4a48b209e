"""Engines that sample ahead in turns with a trainer and die: what there is of each response is kept over the sleep."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import OnThePath
from eventually import eventually
from patient_engine import PROMPTS, NappingEngine, response
from test_engines_go_on import PATIENT, REWARD, SAMPLES, STALENESS, STEPS, check_turn, rollouts_of
from test_evaluation_in_mid_run import HELD_OUT, note_answers
from test_restarts_in_turns import Trainer, died

import megarl.rollout
from megarl.cluster.colocation import SharedGpus
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import ENGINE, POLICY, engine_role
from megarl.data import PromptSampler
from megarl.data.stretches import fetch
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.refit.refit import Refit
from megarl.rewards import Scorer
from megarl.schema import ClusterConfig, LoopConfig, MegarlConfig, RewardConfig, RolloutConfig, ScheduleConfig
from megarl.stages.evaluate import EvalSettings, evaluate
from megarl.tracking.clock import Clock

NAPPING = replace(PATIENT, title="Napping", engine_class=("patient_engine", "NappingEngine"))
DEATHS = 4


@pytest.mark.long
@pytest.mark.usefixtures("shared_cluster")
@pytest.mark.parametrize("replicas", [1, 2])
def test_engines_die_in_any_turn_and_no_token_is_lost_or_too_old(
    replicas, script, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(megarl.rollout.ENGINES, "napping", NAPPING)
    with Scorer(RewardConfig(function=REWARD)) as scorer, in_turns(replicas, tmp_path) as (engines, refit, gpus):
        trainer = Trainer(tmp_path / "script")
        gpus.add(trainer)
        refit(0)
        evaluated = note_answers(engines, monkeypatch)
        rollouts = rollouts_of(configuration(replicas), engines, scorer, PromptSampler(100, False, 0), gpus)
        trained = []
        for version in range(STEPS):
            if version == 0:
                script("generate", suffix=".late")
            trained += rollouts.take(Clock()).groups
            assert eventually(lambda seen=version: all(each.versions[-1] == seen for each in in_flight(rollouts)))
            gpus.switch_to(trainer)
            if version == 0:
                # All that the first one had told of before it ended a response.
                assert (
                    f"behind the {NappingEngine.told * len(in_flight(rollouts)) // replicas} tokens"
                    in capsys.readouterr().err
                )
            if version == 1:
                check_a_death_asleep(engines, rollouts, script)
            if version == 2:
                script("commit_update")
            refit(version + 1)
            rollouts.note_refit()
            gpus.switch_to(engines)
            if version == 2:
                script("generate")
            evaluate(engines, HELD_OUT, scorer, make_tokenizer(), EvalSettings(32, ()))
            assert {each for turn in evaluated for each in fetch(turn.versions).tolist()} == {version + 1}
            evaluated.clear()
        assert died(engines, DEATHS)
        # The run has all that it wants of this one.
        script("close")
    assert [group.ordinal for group in trained] == list(range(STEPS * PROMPTS))
    for group in trained:
        for sample, member in enumerate(group.members):
            check_turn(member.turns[0], group.ordinal, response(group.ordinal, sample, False))


def configuration(replicas):
    return MegarlConfig(
        loop=LoopConfig(steps=STEPS, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES),
        schedule=ScheduleConfig(max_staleness=STALENESS, in_flight="recompute"),
        rollout=RolloutConfig(engine="napping", max_response_tokens=32, replicas=replicas),
    )


@contextmanager
def in_turns(replicas, folder):
    """Engines, how they get weights, and whose turn it is: theirs."""
    rollout = configuration(replicas).rollout
    with (
        reserve([engine_role(ClusterConfig(), rollout)], ClusterConfig()) as seats,
        EngineGroup(rollout, seats[ENGINE], folder, DEATHS) as engines,
    ):
        engines.wait_started(engines.begin_start(Path("model"), load_weights=False))
        gpus = SharedGpus(engines, {POLICY, ENGINE}, None)
        refit = Refit(None, engines, OnThePath(), ["weight"], timeout_s=60, gpus=gpus)
        engines.recover_with(refit.catch_up)
        yield engines, refit, gpus


def in_flight(rollouts):
    """The parts of all samples that are in flight; empty turns of those that nothing was told of."""
    return [turn for own in rollouts._in_flight.partials().values() for each in own for turn in each.turns.values()]


def check_a_death_asleep(engines, rollouts, script):
    """All that it was cut off from is there, before and after."""
    before = in_flight(rollouts)
    assert len(before) == PROMPTS * STALENESS * SAMPLES
    script("version")
    assert eventually(lambda: died(engines, 2))
    after = in_flight(rollouts)
    assert [each.token_ids.tolist() for each in after] == [each.token_ids.tolist() for each in before]
