import math

import pytest
import torch

from megarl.algorithms import Metrics
from megarl.algorithms.metrics import Mean
from megarl.algorithms.policy_losses.ratios import ratio_counts


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


def test_means_are_over_all_elements_of_all_pieces() -> None:
    pieces = [Metrics(means={"length": Mean.of(torch.tensor(values))}) for values in ([1.0, 2.0, 6.0], [], [7.0])]
    assert Metrics.merge(pieces).values() == {"length": 4.0}


def test_a_formula_is_of_the_means_of_the_whole_batch() -> None:
    def variance(mean: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        return mean_square - mean.square()

    values = torch.tensor([1.0, 2.0, 6.0, 7.0])
    pieces = [Mean.of(part, part.square(), formula=variance) for part in values.split([1, 3])]
    assert (pieces[0] + pieces[1]).value == pytest.approx(float(values.var(correction=0)))


def test_a_mean_of_nothing_is_no_number() -> None:
    assert math.isnan(Mean.of(torch.zeros(0)).value)


def test_metrics_of_one_piece_join() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    joined = Metrics({"a": one}, {"b": two}) | Metrics({"c": two}, {"d": one}, {"e": Mean.of(torch.ones(3))})
    assert joined.values() == {"a": 1.0, "b": 2.0, "c": 2.0, "d": 1.0, "e": 1.0}


def test_steps_are_averaged_and_of_maxima_the_largest_is_taken() -> None:
    steps = [
        Metrics(
            {"loss": torch.tensor(value)}, {"largest": torch.tensor(value)}, {"mean": Mean.of(torch.tensor([value]))}
        )
        for value in (1.0, 5.0, 3.0)
    ]
    assert Metrics.summary(steps) == {"loss": 3.0, "largest": 5.0, "mean": 3.0}


def test_a_step_without_elements_of_a_mean_is_left_out_of_it() -> None:
    values = [torch.zeros(0), torch.tensor([0.3, 0.5]), torch.tensor([0.8])]
    steps = [Metrics(means={"gap": Mean.of(each)}, kl_to_reference=Mean.of(each)) for each in values]
    assert Metrics.summary(steps) == pytest.approx({"gap": 0.6, "policy/kl_to_reference": 0.6})
    gap = Metrics.summary(steps[:1])["gap"]
    assert isinstance(gap, float)
    assert math.isnan(gap)


def test_all_tensors_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(
        {"sum": torch.tensor(1.0)},
        {"largest": torch.tensor(2.0)},
        {"mean": Mean.of(torch.tensor([4.0, 8.0]))},
        {"ratios": ratio_counts(torch.zeros(3))},
        Mean.of(torch.tensor([6.0])),
    )
    # No GPU is needed to see that each is asked to come.
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self * 10)
    found = metrics.cpu()
    assert found.sums == {"sum": torch.tensor(10.0)}
    assert found.maxima == {"largest": torch.tensor(20.0)}
    for mean, total, count in ((found.means["mean"], 120.0, 20.0), (found.kl_to_reference, 60.0, 10.0)):
        assert mean is not None
        assert (mean.totals.tolist(), float(mean.count)) == ([total], count)
    assert sum(found.histograms["ratios"].value.counts) == 30


def test_counts_of_ratios_add_up_over_pieces_and_steps_to_a_histogram() -> None:
    log_ratios = torch.tensor([0.0, 0.002, -0.5, 7.0])
    steps = [
        Metrics.merge([Metrics(histograms={"ratios": ratio_counts(piece)}) for piece in log_ratios.split(size)])
        for size in (1, 3)
    ]
    found = Metrics.summary(steps)["ratios"]
    assert found == ratio_counts(log_ratios.repeat(2)).value
