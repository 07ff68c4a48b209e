import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.tracking import Histogram
from megarl.tracking.histogram import numbers

VALUES = st.lists(st.floats(-10, 10, allow_subnormal=False), max_size=30)
EDGES = st.lists(st.integers(-9, 9), min_size=2, max_size=8, unique=True).map(sorted)


@given(VALUES, EDGES)
def test_every_value_is_in_the_bin_around_it_or_in_an_outer_one(values, edges):
    expected = [0] * (len(edges) - 1)
    for value in values:
        places = [place for place, low in enumerate(edges[:-1]) if value >= low]
        expected[places[-1] if places else 0] += 1
    histogram = Histogram.of(values, edges)
    assert histogram == Histogram(tuple(edges), tuple(expected))
    assert histogram.total == len(values)


@given(VALUES.filter(len), EDGES, st.floats(0, 1))
def test_a_quantile_has_its_share_of_the_values_below_it(values, edges, share):
    histogram = Histogram.of(values, edges)
    inside = np.clip(values, edges[0], edges[-1])
    quantile = histogram.quantile(share)
    # As exact as the bins are: a bin lower has fewer values below it, a bin higher more.
    place = min(max(int(np.searchsorted(edges, quantile, side="left")), 1), len(edges) - 1)
    low, high = edges[place - 1], edges[place]
    assert low <= quantile <= high
    assert np.mean(inside < low) <= share + 1e-9
    assert np.mean(inside <= high) >= share - 1e-9


def test_quantiles_are_read_within_a_bin():
    histogram = Histogram((0, 1, 2, 6), (0, 2, 2))
    assert [histogram.quantile(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [0, 1.5, 2, 4, 6]
    assert np.isnan(Histogram((0, 1), (0,)).quantile(0.5))


def test_neighbours_are_joined_until_there_are_few_enough_bins():
    five = Histogram((0, 1, 2, 3, 4, 6), (1, 2, 3, 4, 5))
    assert five.with_at_most(5) == five == five.with_at_most(9)
    assert five.with_at_most(4) == five.with_at_most(3) == Histogram((0, 2, 4, 6), (3, 7, 5))
    assert five.with_at_most(2) == Histogram((0, 3, 6), (6, 9))
    assert five.with_at_most(1) == Histogram((0, 6), (15,))


@pytest.mark.parametrize(
    ("edges", "counts"), [((0,), ()), ((0, 1), (1, 2)), ((1, 1), (1,)), ((2, 1), (1,)), ((0, float("inf")), (1,))]
)
def test_bins_that_are_none_are_refused(edges, counts):
    with pytest.raises(ValueError, match="of a histogram"):
        Histogram(edges, counts)


def test_numbers_are_what_is_no_histogram():
    assert numbers({"a": 1.0, "b": Histogram((0, 1), (2,))}) == {"a": 1.0}


def test_bins_of_numbered_things():
    assert Histogram.of_numbered([5, 7]) == Histogram((-0.5, 0.5, 1.5), (5, 7))
    assert Histogram.of_numbered([5, 7]).is_numbered
    assert not Histogram((0.5, 1.5, 2.5), (5, 7)).is_numbered
    assert not Histogram((-0.5, 0.5, 2.5), (5, 7)).is_numbered
