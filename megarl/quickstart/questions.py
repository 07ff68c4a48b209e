"""The task of the quickstart's real model: sums in words, whose answers can be verified.

A held-out question has a pair of numbers that no question to train on has, in whatever words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.quickstart.rows import write_rows

DATA_SOURCE = "megarl/sums_in_words"
HELD_OUT = 128
SMALLEST, LARGEST = 2, 39
WORDINGS = (
    "What is {a} + {b}? Answer with the number only.",
    "What is {a} plus {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "Tom has {a} apples and buys {b} more. How many apples does he have now? Answer with the number only.",
)
"""How a pair is asked for; the pairs take turns."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class QuestionFiles:
    """Parquet files of the task, in verl's columns."""

    train: Path
    eval: Path


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return all pairs in the order of `seed`, cut into those to train on and the `HELD_OUT` ones."""
    count = LARGEST + 1 - SMALLEST
    order = np.random.default_rng(seed).permutation(count * count).tolist()
    pairs = [(SMALLEST + number // count, SMALLEST + number % count) for number in order]
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def write_questions(folder: Path, *, seed: int = 0) -> QuestionFiles:
    """Write the files, each of the name of its field, to `folder`, made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = QuestionFiles(folder / "train.parquet", folder / "eval.parquet")
    train, evaluation = split_pairs(seed)
    write_rows(files.train, _rows(train, "train"))
    write_rows(files.eval, _rows(evaluation, "eval"))
    return files


def _rows(pairs: Sequence[Pair], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": WORDINGS[index % len(WORDINGS)].format(a=first, b=second)}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(first + second)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (first, second) in enumerate(pairs)
    ]
