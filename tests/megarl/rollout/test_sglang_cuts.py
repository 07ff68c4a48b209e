"""Heads and vocabularies of planned engines beside what SGLang's own layers load."""

import pytest
import torch
from in_sglang import output_of

from converters.architectures import Dimension, Kind
from converters.layouts.cuts import ENGINES, cut

CASES = [
    # Workers, query heads, heads of keys, rows of a head, size of the vocabulary.
    (2, 8, 8, 4, 128),
    (2, 8, 1, 4, 100),
    (4, 8, 2, 4, 129),
    (8, 16, 4, 2, 65),
    (3, 6, 3, 4, 65),
]


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
    torch.save(CASES, tmp_path / "given.pt")
    output_of("cut_in_sglang.py", tmp_path)
    made = torch.load(tmp_path / "made.pt")
    for case, workers in zip(CASES, made, strict=True):
        found = [[part.tolist() for part in of_worker] for of_worker in workers]
        assert found == [planned(worker, *case) for worker in range(case[0])], case
