"""Engines that die while they take turns with a trainer: new ones start when the trainer has no memory."""

import pytest
from echo_engine import TAKEN
from eventually import eventually
from test_restarts import EXPECTED, answered, states

from megarl.cluster.colocation import SharedGpus
from megarl.cluster.placement.roles import ENGINE, POLICY
from megarl.cluster.trainer.trainer_group import TrainerGroup

pytestmark = [pytest.mark.usefixtures("shared_cluster", "short_waits"), pytest.mark.long]


class Trainer(TrainerGroup):
    """Ranks that need no processes: their memory is a file, which engines see."""

    name = POLICY

    def __init__(self, folder):
        self._taken = folder / TAKEN
        self._held = set()
        self.moves = []
        """How many parts were taken, or, negative, given back since this was emptied."""

    def offload(self, parts):
        self._held -= set(parts)
        self.moves.append(-len(parts))
        self._taken.unlink() if not self._held else None

    def reload(self, parts):
        self._held |= set(parts)
        self.moves.append(len(parts))
        self._taken.touch()

    def take_device_peak(self):
        return 0


def test_engines_that_die_start_in_their_turn_and_join_with_the_next_refit(open_group, script, tmp_path):
    """In one test, because processes take seconds to start."""
    made = []

    def gpus_of(engines):
        made.append(SharedGpus(engines, {POLICY, ENGINE}, None))
        return made[0]

    with open_group(2, restarts=9, gpus=gpus_of, engine_start_timeout_s=20) as (engines, refit):
        (gpus,), trainer = made, Trainer(tmp_path / "script")
        gpus.add(trainer)
        refit(0)
        gpus.switch_to(engines)
        assert answered(engines) == EXPECTED
        check_the_death_of_one_asleep(engines, refit, gpus, trainer, script)
        check_the_death_of_all_asleep(engines, refit, gpus, trainer, script)
        check_the_death_of_all_awake(engines, gpus, trainer, script)
        check_a_death_between_turns(engines, refit, gpus, trainer, script)
        check_that_one_that_starts_is_waited_for(engines, refit, gpus, trainer, script)
        check_that_one_that_hangs_in_its_start_keeps_no_turn(engines, refit, gpus, trainer, script)
        gpus.switch_to(engines)
        assert answered(engines) == EXPECTED
        assert states(engines) == [("serving", 7, 0)] * 2


def died(engines, count):
    """Whether so many have died so far, with weights or without, and all of them are restarted or will be."""
    deaths = engines._restarts.count + engines._restarts._failed_starts
    return deaths == count and all(handle.state != "down" for handle in engines.handles)


def stages(engines):
    return sorted(each.stage for each in engines._restarts._under_way.values())


def check_the_death_of_one_asleep(engines, refit, gpus, trainer, script):
    gpus.switch_to(trainer)
    # Heard of at once, and prepared; the trainer stays as it is.
    script("version")
    assert eventually(lambda: died(engines, 1) and stages(engines) == ["prepared"])
    trainer.moves.clear()
    refit(1)
    assert trainer.moves == [-1]
    assert sorted(states(engines)) == [("restarting", -1, 0), ("serving", 1, 0)]
    gpus.switch_to(engines)
    # Up beside the one that serves, it waits for the refit.
    assert eventually(lambda: answered(engines) == EXPECTED and stages(engines) == ["loaded"])
    assert sorted(states(engines)) == [("serving", 1, 0), ("starting", -1, 0)]
    trainer.moves.clear()
    gpus.switch_to(trainer)
    assert trainer.moves == [2]
    refit(2)
    assert states(engines) == [("serving", 2, 0)] * 2


def check_the_death_of_all_asleep(engines, refit, gpus, trainer, script):
    gpus.switch_to(trainer)
    script("version", "version")
    assert eventually(lambda: died(engines, 3))
    trainer.moves.clear()
    refit(3)
    # The refit has somebody to go to: one side has given all back, and then half was taken.
    assert trainer.moves == [-2, 1]
    assert ("serving", 3, 0) in states(engines)
    gpus.switch_to(engines)
    all_serve(engines, refit, gpus, trainer, 4)


def check_the_death_of_all_awake(engines, gpus, trainer, script):
    gpus.switch_to(engines)
    trainer.moves.clear()
    script("generate", "generate")
    assert answered(engines) == EXPECTED
    assert died(engines, 5)
    # They had the weights in the same turn, as nobody serves.
    assert trainer.moves[:2] == [1, -1]


def check_a_death_between_turns(engines, refit, gpus, trainer, script):
    script("sleep")
    gpus.switch_to(trainer)
    script("wake_up")
    gpus.switch_to(engines)
    assert died(engines, 7)
    all_serve(engines, refit, gpus, trainer, 5)


def check_that_one_that_starts_is_waited_for(engines, refit, gpus, trainer, script):
    gpus.switch_to(engines)
    script("generate")
    assert eventually(lambda: answered(engines) == EXPECTED and stages(engines) in (["load"], ["loaded"]))
    gpus.switch_to(trainer)
    assert stages(engines) == ["loaded"]
    refit(6)
    assert died(engines, 8)


def check_that_one_that_hangs_in_its_start_keeps_no_turn(engines, refit, gpus, trainer, script):
    gpus.switch_to(engines)
    script("generate")
    script("start", suffix=".hang")
    assert eventually(lambda: answered(engines) == EXPECTED and stages(engines) == ["load"])
    gpus.switch_to(trainer)
    # Prepared anew, and no more: it is the trainer's turn.
    assert died(engines, 10)
    assert engines._restarts._failed_starts > 0
    assert eventually(lambda: stages(engines) == ["prepared"])
    gpus.switch_to(engines)
    all_serve(engines, refit, gpus, trainer, 7)


def all_serve(engines, refit, gpus, trainer, version):
    """Let those that died start in the engines' turn, and join."""
    assert eventually(lambda: answered(engines) == EXPECTED and set(stages(engines)) <= {"loaded"})
    gpus.switch_to(trainer)
    refit(version)
    assert states(engines) == [("serving", version, 0)] * 2
