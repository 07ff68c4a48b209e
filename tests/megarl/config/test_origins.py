"""Every value of a configuration is traced to where it was given; the last place that gives it is named."""

from pathlib import Path

import pytest

from megarl.config.assignment import Assignment
from megarl.config.origins import DEFAULT, OPEN, Setting, explain

RECIPES = {
    "base.yaml": "output_dir: out\nloop:\n  steps: 7\n  seed: 3\nmegatron: {lr: 1}\nrollout:\n  engine_args: {}\n",
    "mine.yaml": "defaults: [base, {algorithm: fast}, _self_]\n\nloop:\n  steps: 9\n",
    "algorithm/fast.yaml": "updates_per_step: 2\n",
    "algorithm/slow.yaml": "# slower\nupdates_per_step: 1\nkl_coefficient: 0.5\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in RECIPES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def origins(folder: Path, *assignments: Assignment) -> dict[str, Setting]:
    return explain("mine", assignments, str(folder))


def test_a_value_comes_from_the_last_file_that_gives_it(folder: Path) -> None:
    found = origins(folder)
    assert found["loop.steps"] == Setting(9, f"{folder}/mine.yaml:4")
    assert found["loop.seed"] == Setting(3, f"{folder}/base.yaml:4")
    assert found["megatron.lr"] == Setting(1.0, f"{folder}/base.yaml:5")
    assert found["algorithm.updates_per_step"] == Setting(2, f"{folder}/algorithm/fast.yaml:1")
    assert found["loop.prompts_per_step"] == Setting(64, DEFAULT)
    assert found["model.path"] == Setting(OPEN, "open")


def test_overrides_and_flags_win_and_are_named(folder: Path) -> None:
    given = [
        Assignment("model.path=m", "override"),
        Assignment("loop.steps=1", "override"),
        Assignment("rollout.engine_args={max_num_seqs: 4}", "override"),
        Assignment("loop.steps=2", "flag --steps"),
    ]
    found = origins(folder, *given)
    assert found["model.path"] == Setting("m", "override")
    assert found["loop.steps"] == Setting(2, "flag --steps")
    assert found["rollout.engine_args.max_num_seqs"] == Setting(4, "override")
    assert found["loop.seed"].origin == f"{folder}/base.yaml:4"


def test_another_preset_brings_its_own_file_and_leaves_other_keys_at_their_defaults(folder: Path) -> None:
    found = origins(folder, Assignment("algorithm=slow", "override"))
    assert found["algorithm.kl_coefficient"] == Setting(0.5, f"{folder}/algorithm/slow.yaml:3")
    assert found["algorithm.updates_per_step"] == Setting(1, f"{folder}/algorithm/slow.yaml:2")
    assert found["algorithm.advantage"].origin == DEFAULT


def test_what_megarl_adds_by_itself_is_said_to_follow(folder: Path) -> None:
    found = origins(folder, Assignment("schedule.max_staleness=1", "override"))
    assert found["algorithm.corrections"].origin == "follows from other keys"
    assert found["algorithm.corrections"].value[0]["kind"] == "token_importance"
