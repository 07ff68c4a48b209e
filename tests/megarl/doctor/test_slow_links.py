"""Ways of clusters that are measured with noise: sound ones pass, and what is slow is named."""

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.doctor.cluster_check import rounds
from megarl.doctor.cluster_faults import find_faults
from megarl.doctor.node_probe import Link, Node
from megarl.doctor.slow_links import SLOW, TIMES, measured_again, slow, slow_nodes

SIGMA = 0.15
SEEDS = range(3)


class Cluster:
    """Nodes whose ways carry 5 GB/s, times a `share` that some nodes and ways have, times noise."""

    def __init__(self, count, seed, share=lambda _sender, _receiver: 1.0, sigma=SIGMA):
        self.nodes = [Node(f"n{place}", f"10.0.0.{place}", {}, [], ()) for place in range(count)]
        self.measured = []
        self._share, self._sigma, self._random = share, sigma, Random(seed)

    def measure(self, ways):
        ends = [end for way in ways for end in way]
        assert len(ends) == len(set(ends))
        self.measured += ways
        return [
            Link(*way, 5.0 * self._share(*way) * self._random.lognormvariate(0, self._sigma), 0.0001) for way in ways
        ]

    def links(self):
        names = [node.name for node in self.nodes]
        found = []
        for pairs in rounds(len(names)):
            found += self.measure([(names[one], names[other]) for one, other in pairs])
            found += self.measure([(names[other], names[one]) for one, other in pairs])
        return found

    def faults(self):
        return find_faults(self.nodes, measured_again(self.links(), self.measure))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [2, 3, 16, 48])
def test_a_sound_cluster_has_no_faults_however_its_ways_vary(count, seed):
    assert Cluster(count, seed).faults() == []


def test_one_measurement_would_name_some():
    cluster = Cluster(48, 0)
    assert find_faults(cluster.nodes, cluster.links())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [16, 48])
@pytest.mark.parametrize("ends", [(0, 1), (0,), (1,)])
def test_a_node_at_half_speed_is_named(count, seed, ends):
    def share(*way):
        return 0.5 if "n3" in [way[end] for end in ends] else 1.0

    assert [fault.node for fault in Cluster(count, seed, share).faults() if fault.refuses] == ["n3"]


def test_one_slow_way_is_a_warning():
    cluster = Cluster(16, 0, lambda *way: 0.2 if way == ("n1", "n2") else 1.0)
    assert [(fault.node, fault.refuses) for fault in cluster.faults()] == [("n1", False)]
    assert cluster.measured.count(("n1", "n2")) == TIMES


def test_the_best_of_all_measurements_counts():
    cluster = Cluster(3, 0, lambda *way: 0.2 if way == ("n1", "n2") else 1.0, sigma=0)

    def worse(ways):
        return [Link(*way, 0.9, 0.01) for way in ways]

    (link,) = [each for each in measured_again(cluster.links(), worse) if (each.sender, each.receiver) == ("n1", "n2")]
    assert (link.gbyte_per_s, link.latency_s) == (1.0, 0.0001)


def test_what_is_well_is_measured_once():
    cluster = Cluster(16, 0, sigma=0.01)
    assert cluster.faults() == []
    assert len(cluster.measured) == len(set(cluster.measured)) == 16 * 15


def test_a_connection_that_fails_at_the_second_time_is_said():
    def measure(ways):
        return [Link(*way, 0.0, 0.0, "timed out") for way in ways]

    cluster = Cluster(3, 0, lambda *way: 0.2 if way == ("n1", "n2") else 1.0)
    (fault,) = find_faults(cluster.nodes, measured_again(cluster.links(), measure))
    assert (fault.node, fault.what) == ("n1", "no connection to n2 (timed out)")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_each_is_compared_with_the_median_of_the_others(values):
    rates = dict(enumerate(values))
    expected = []
    for key, rate in rates.items():
        others = [other for name, other in rates.items() if name != key]
        if others and rate < SLOW * median(others):
            expected.append((key, rate, median(others)))
    assert list(slow(rates)) == expected


WAYS = [(one, other) for one in "abcdef" for other in "abcdef" if one != other]


@given(st.dictionaries(st.sampled_from(WAYS), st.sampled_from([0.5, 1.0, 2.0, 2.5, 5.0])))
def test_a_node_is_compared_with_the_median_between_the_others(rates):
    expected = []
    for name in "abcdef":
        others = [rate for way, rate in rates.items() if name not in way]
        usual = median(others) if others else 0.0
        found = set()
        for end in (0, 1):
            own = [way for way in rates if way[end] == name]
            slow_ones = {way for way in own if rates[way] < SLOW * usual}
            found |= slow_ones if len(slow_ones) > max(1, len(own) / 2) else set()
        if found:
            expected.append((name, found, median(rates[way] for way in found), usual))
    assert slow_nodes(rates) == expected
