"""The quickstart's task: two-digit addition, with verifiable answers.

A prompt reads `12+94=`; its answer is the sum as three digits in reverse order, `601`, so that each digit follows from
those already written. All characters are tokens of `megarl.quickstart.tiny_models`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megarl.quickstart.rows import write_rows

DATA_SOURCE = "megarl/two_digit_addition"
HELD_OUT = 256

Pair = tuple[int, int]


@dataclass(frozen=True)
class ArithmeticFiles:
    """Parquet files of the task, in three forms.

    They are prompts in verl's columns, the same pairs as conversations in `messages`, and as preferences, with the
    right answer in `chosen` and a wrong one in `rejected`.
    """

    train: Path
    eval: Path
    sft_train: Path
    sft_eval: Path
    pairs_train: Path
    pairs_eval: Path


def question(pair: Pair) -> str:
    """Return the prompt of six characters."""
    return f"{pair[0]:02d}+{pair[1]:02d}="


def answer(pair: Pair) -> str:
    """Return the sum of `pair` (each 0 to 99) as three digits in reverse order."""
    return f"{sum(pair):03d}"[::-1]


def split_pairs(seed: int, held_out: int = HELD_OUT) -> tuple[list[Pair], list[Pair]]:
    """Return all 10,000 ordered pairs shuffled by `seed`, split into pairs to train on and `held_out` others."""
    order = np.random.default_rng(seed).permutation(100 * 100).tolist()
    pairs = [divmod(number, 100) for number in order]
    return pairs[held_out:], pairs[:held_out]


def write_arithmetic(folder: Path, *, seed: int = 0, held_out: int = HELD_OUT) -> ArithmeticFiles:
    """Write the files, each named after its field, to `folder`, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(*(folder / f"{field.name}.parquet" for field in fields(ArithmeticFiles)))
    train, evaluation = split_pairs(seed, held_out)
    write_rows(files.train, _prompt_rows(train, "train"))
    write_rows(files.eval, _prompt_rows(evaluation, "eval"))
    write_rows(files.sft_train, _conversation_rows(train))
    write_rows(files.sft_eval, _conversation_rows(evaluation))
    preferences = _preference_rows([*train, *evaluation])
    write_rows(files.pairs_train, preferences[: len(train)])
    write_rows(files.pairs_eval, preferences[len(train) :])
    return files


def _prompt_rows(pairs: Sequence[Pair], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(pair)}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": answer(pair)},
            "extra_info": {"index": index, "split": split},
        }
        for index, pair in enumerate(pairs)
    ]


def _conversation_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": question(pair)},
                {"role": "assistant", "content": answer(pair)},
            ]
        }
        for pair in pairs
    ]


def _preference_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The wrong answer is that of a later pair, so that only the question tells which of the two is right."""
    return [
        {
            "prompt": [{"role": "user", "content": question(pair)}],
            "chosen": answer(pair),
            "rejected": answer(next(other for other in _after(pairs, index) if sum(other) != sum(pair))),
        }
        for index, pair in enumerate(pairs)
    ]


def _after(pairs: Sequence[Pair], index: int) -> Iterator[Pair]:
    """The pairs after `index`, wrapping around."""
    return (pairs[(index + offset) % len(pairs)] for offset in range(1, len(pairs)))
