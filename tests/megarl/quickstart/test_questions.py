import pyarrow.parquet as pq
import pytest

from megarl.cli import quickstart
from megarl.quickstart.models import MODELS, SCHEDULES
from megarl.quickstart.questions import LARGEST, SMALLEST, WORDINGS, write_questions
from megarl.rewards.text_match import numeric_match


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    files = write_questions(tmp_path_factory.mktemp("questions") / "data", seed=3)
    return {name: pq.read_table(getattr(files, name)).to_pylist() for name in ("train", "eval")}


def numbers(row):
    found = [int(word.strip("?.")) for word in row["prompt"][0]["content"].split() if word.strip("?.").isdigit()]
    return tuple(found)


def test_every_pair_is_asked_for_once_and_no_held_out_one_is_trained_on(rows):
    asked = {name: [numbers(row) for row in some] for name, some in rows.items()}
    every = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    assert sorted(asked["train"] + asked["eval"]) == every
    assert len(asked["eval"]) == 128
    assert sum((b, a) in asked["train"] for a, b in asked["eval"]) > 64


def test_the_answer_is_the_sum_and_the_reward_knows_it(rows):
    for row in (*rows["train"], *rows["eval"]):
        truth = row["reward_model"]["ground_truth"]
        assert int(truth) == sum(numbers(row))
        assert numeric_match("", f"The sum is {truth}.", truth) == 1.0
        assert numeric_match("", f"The sum is {truth}0.", truth) == 0.0


def test_the_wordings_take_turns(rows):
    for some in rows.values():
        for wording in WORDINGS:
            start = wording.split("{a}")[0]
            count = sum(row["prompt"][0]["content"].startswith(start) for row in some)
            assert count >= len(some) // len(WORDINGS)


def test_the_command_knows_the_models_and_schedules_that_there_are():
    assert set(quickstart.MODELS) == set(MODELS)
    assert set(quickstart.SCHEDULES) == set(SCHEDULES)
