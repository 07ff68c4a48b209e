"""The quickstart's task: two-digit addition, with an answer that can be verified.

A prompt reads `12+94=`; its answer is the sum as three digits from the last to the first, `601`, so that each digit
follows from those already written. All characters are tokens of `megarl.quickstart.tiny_models`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "megarl/two_digit_addition"
HELD_OUT = 256

Pair = tuple[int, int]


@dataclass(frozen=True)
class ArithmeticFiles:
    """Parquet files of the task: prompts in verl's columns, and the same pairs as conversations in `messages`."""

    train: Path
    eval: Path
    sft_train: Path
    sft_eval: Path


def question(pair: Pair) -> str:
    """Return the prompt, six characters."""
    return f"{pair[0]:02d}+{pair[1]:02d}="


def answer(pair: Pair) -> str:
    """Return the sum of `pair` (each 0 to 99) as three digits from the last to the first."""
    return f"{sum(pair):03d}"[::-1]


def split_pairs(seed: int, held_out: int = HELD_OUT) -> tuple[list[Pair], list[Pair]]:
    """Return all 10,000 pairs in the order of `seed`, cut into those to train on and the `held_out` ones."""
    order = np.random.default_rng(seed).permutation(100 * 100).tolist()
    pairs = [divmod(number, 100) for number in order]
    return pairs[held_out:], pairs[:held_out]


def write_arithmetic(folder: Path, *, seed: int = 0, held_out: int = HELD_OUT) -> ArithmeticFiles:
    """Write train.parquet, eval.parquet, sft_train.parquet and sft_eval.parquet to `folder`, made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(*(folder / f"{name}.parquet" for name in ("train", "eval", "sft_train", "sft_eval")))
    train, evaluation = split_pairs(seed, held_out)
    _write(files.train, _prompt_rows(train, "train"))
    _write(files.eval, _prompt_rows(evaluation, "eval"))
    _write(files.sft_train, _conversation_rows(train))
    _write(files.sft_eval, _conversation_rows(evaluation))
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


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.replace(path)
