from collections import Counter

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data import load_conversations, load_prompts
from megarl.quickstart import questions
from megarl.quickstart.arithmetic import answer, question, split_pairs, write_arithmetic
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.schema import DataConfig


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("arithmetic") / "data", seed=3)


def test_the_answer_is_the_sum_from_its_last_digit_to_its_first():
    assert (question((12, 94)), answer((12, 94))) == ("12+94=", "601")
    assert (question((0, 7)), answer((0, 7))) == ("00+07=", "700")


@given(st.integers(0, 1000), st.integers(1, 9999))
def test_the_split_has_every_pair_once(seed, held_out):
    train, evaluation = split_pairs(seed, held_out)
    assert len(evaluation) == held_out
    assert sorted(train + evaluation) == [(a, b) for a in range(100) for b in range(100)]


@pytest.mark.parametrize("split", [split_pairs, questions.split_pairs])
def test_the_split_follows_the_seed(split):
    assert split(1) == split(1)
    assert set(split(1)[1]) != set(split(2)[1])


def test_every_prompt_has_its_sum(files):
    rows = pq.read_table(files.train).to_pylist() + pq.read_table(files.eval).to_pylist()
    assert len(rows) == 10_000
    for row in rows:
        first, second = row["prompt"][0]["content"].rstrip("=").split("+")
        assert int(row["reward_model"]["ground_truth"][::-1]) == int(first) + int(second)


def test_no_held_out_pair_is_trained_on(files):
    def questions(path, column):
        return {row[column][0]["content"] for row in pq.read_table(path).to_pylist()}

    held_out = questions(files.eval, "prompt")
    assert len(held_out) == 256
    assert held_out == questions(files.sft_eval, "messages")
    assert not held_out & questions(files.train, "prompt")
    assert not held_out & questions(files.sft_train, "messages")


def test_prompts_load_and_their_answers_survive_the_tokenizer(files):
    tokenizer = make_tokenizer()
    loaded = load_prompts([files.eval], tokenizer, DataConfig(max_prompt_tokens=8))
    assert len(loaded.prompts) == 256
    for prompt in loaded.prompts:
        assert tokenizer.decode(tokenizer(prompt.ground_truth)["input_ids"]) == prompt.ground_truth


def test_conversations_teach_the_answer_and_its_end(files):
    tokenizer = make_tokenizer()
    conversations = load_conversations([files.sft_eval], tokenizer, "messages", 12)
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(files.eval).to_pylist()]
    for (token_ids, mask), truth in zip(conversations, truths, strict=True):
        assert tokenizer.decode([token for token, kept in zip(token_ids, mask, strict=True) if kept]) == f"{truth}<end>"


def test_a_preference_is_a_right_answer_and_one_to_another_question(files):
    rows = pq.read_table(files.pairs_train).to_pylist() + pq.read_table(files.pairs_eval).to_pylist()
    assert len(rows) == 10_000
    for row in rows:
        first, second = row["prompt"][0]["content"].rstrip("=").split("+")
        assert int(row["chosen"][::-1]) == int(first) + int(second) != int(row["rejected"][::-1])
    # Alone, a wrong answer looks like a right one.
    for digit in range(3):
        right, wrong = (Counter(row[kind][digit] for row in rows) for kind in ("chosen", "rejected"))
        assert all(abs(right[character] - wrong[character]) < 100 for character in "0123456789")


def test_the_same_seed_writes_the_same_rows(files, tmp_path):
    again = write_arithmetic(tmp_path, seed=3)
    for name in ("train", "eval", "sft_train", "sft_eval", "pairs_train", "pairs_eval"):
        assert pq.read_table(getattr(again, name)).equals(pq.read_table(getattr(files, name)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.parquet",
        "pairs_eval.parquet",
        "pairs_train.parquet",
        "sft_eval.parquet",
        "sft_train.parquet",
        "train.parquet",
    ]
