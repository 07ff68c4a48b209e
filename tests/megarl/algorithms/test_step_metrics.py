import pytest
import torch

from megarl.algorithms import Metrics


def test_pieces_merge_by_sum_and_by_maximum() -> None:
    pieces = [
        Metrics({"loss": torch.tensor(float(value))}, {"largest": torch.tensor(float(value))}) for value in (1, 5, 3)
    ]
    merged = Metrics.merge(pieces)
    assert merged.sums == {"loss": torch.tensor(9.0)}
    assert merged.maxima == {"largest": torch.tensor(5.0)}


def test_pieces_with_different_names_are_refused() -> None:
    with pytest.raises(ValueError, match="different metrics"):
        Metrics.merge([Metrics({"loss": torch.tensor(1.0)}), Metrics({})])
