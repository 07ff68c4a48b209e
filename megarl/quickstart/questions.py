"""The task of the quickstart's real model: addition in words, with verifiable answers.

No pair of numbers of a held-out question occurs in a training question in the same order, in any wording. Most occur
there in the other order.
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
"""The wordings of a question, used in turn."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class QuestionFiles:
    """Parquet files of the task, in verl's columns."""

    train: Path
    eval: Path


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return all pairs shuffled by `seed`, split into pairs to train on and `HELD_OUT` others."""
    count = LARGEST + 1 - SMALLEST
    order = np.random.default_rng(seed).permutation(count * count).tolist()
    pairs = [(SMALLEST + number // count, SMALLEST + number % count) for number in order]
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def write_questions(folder: Path, *, seed: int = 0) -> QuestionFiles:
    """Write the files, each named after its field, to `folder`, which is created if needed."""
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
