"""Heads and vocabularies of planned engines beside what SGLang's own layers load."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from converters.architectures import Dimension, Kind
from converters.layouts.cuts import ENGINES, cut
from megarl.rollout.sglang.installation import installation

PROGRAM = Path(__file__).parent / "cut_in_sglang.py"
CASES = [
    # Workers, query heads, heads of keys, rows of a head, size of the vocabulary.
    (2, 8, 8, 4, 128),
    (2, 8, 1, 4, 100),
    (4, 8, 2, 4, 129),
    (8, 16, 4, 2, 65),
    (3, 6, 3, 4, 65),
]


def in_sglang(folder, given):
    python, paths = installation()
    torch.save(given, folder / "given.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    subprocess.run([python, PROGRAM, folder], env=environment, check=True, timeout=250)
    return torch.load(folder / "made.pt")


def planned(worker, workers, heads, groups, head_dim, vocabulary):
    """The rows of query, key, value and embedding, counted from 1, that a planned worker has; 0 for one that fills up.

    No worker has two pieces of one tensor.
    """
    queries_and_keys = [[Dimension("heads", units, head_dim)] for units in (heads, groups, groups)]
    attention = cut(Kind.QKV, queries_and_keys, worker, workers, ENGINES)
    embedding = cut(Kind.VOCABULARY, [[Dimension("vocab_size", vocabulary, 1)]], worker, workers, ENGINES)
    assert [piece.source for piece in attention.pieces] == [0, 1, 2]
    of_embedding = [row for piece in embedding.pieces for row in range(piece.start + 1, piece.stop + 1)]
    return [
        *([*range(piece.start + 1, piece.stop + 1)] for piece in attention.pieces),
        of_embedding + [0] * embedding.padding,
    ]


@pytest.mark.sglang
def test_a_planned_worker_has_the_rows_that_sglang_loads(tmp_path):
    made = in_sglang(tmp_path, CASES)
    for case, workers in zip(CASES, made, strict=True):
        found = [[part.tolist() for part in of_worker] for of_worker in workers]
        assert found == [planned(worker, *case) for worker in range(case[0])], case
