"""Links between nodes that are slow or late compared with others, and are so in repeated measurements."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, TypeVar

from megarl.doctor.node_probe import Link

K = TypeVar("K", bound=Hashable)

Way = tuple[str, str]
"""Names of the sending and the receiving node."""
SLOW = 0.7
"""A link below this fraction of the other links' speed is slow."""
LATE = 5.0
"""A latency of this many times the usual one is late, if it is also above `LATE_S`."""
LATE_S = 0.002
TIMES = 5
"""Maximum number of measurements of a link before its node is named, as other traffic slows one of thousands."""


class SlowNode(NamedTuple):
    """A node that sends, or receives, slowly on most of its links, and on at least two."""

    name: str
    ways: frozenset[Way]
    """Its slow links."""
    rate: float
    """The median rate of the slow links."""
    usual: float
    """The median rate between other nodes."""


def slow_nodes(rates: Mapping[Way, float]) -> list[SlowNode]:
    """The nodes that are slow compared with the others."""
    from_and_to = defaultdict[str, tuple[list[Way], list[Way]]](lambda: ([], []))
    for way in rates:
        for end in (0, 1):
            from_and_to[way[end]][end].append(way)
    # Sorted once: a node has few of thousands of links, so its own are skipped.
    in_order = sorted(rates, key=lambda way: rates[way])
    ordered, places = [rates[way] for way in in_order], {way: place for place, way in enumerate(in_order)}
    nodes = []
    for name, both in sorted(from_and_to.items()):
        usual = _median_without(ordered, sorted(places[way] for own in both for way in own)) or 0.0
        found: set[Way] = set()
        for own in both:
            slow_ones = {way for way in own if rates[way] < SLOW * usual}
            if len(slow_ones) > max(1, len(own) / 2):
                found |= slow_ones
        if found:
            nodes.append(SlowNode(name, frozenset(found), median(rates[way] for way in found), usual))
    return nodes


def rates_of(links: Sequence[Link]) -> dict[Way, float]:
    """GB/s of the links that work."""
    return {(link.sender, link.receiver): link.gbyte_per_s for link in links if not link.failure}


def slow(rates: Mapping[K, float]) -> Iterator[tuple[K, float, float]]:
    """Yield what is slow compared with the others: the key, its rate, and the median of the others."""
    ordered = sorted(rates.values())
    for key, rate in rates.items():
        usual = _median_without(ordered, [bisect_left(ordered, rate)])
        if usual is not None and rate < SLOW * usual:
            yield key, rate, usual


def late(links: Sequence[Link]) -> list[Link]:
    """Links over which a message takes much longer than usual."""
    bound_s = max(LATE_S, LATE * usual_latency_s(links))
    return [link for link in links if not link.failure and link.latency_s > bound_s]


def usual_latency_s(links: Sequence[Link]) -> float:
    """The median latency of the links that work; 0 without any."""
    return median([link.latency_s for link in links if not link.failure] or [0.0])


def slow_alone(rates: Mapping[Way, float], nodes: Sequence[SlowNode]) -> Iterator[tuple[Way, float, float]]:
    """Slow links whose ends are not slow nodes, as from `slow`."""
    of_nodes = {way for node in nodes for way in node.ways}
    return slow({way: rate for way, rate in rates.items() if way not in of_nodes})


def measured_again(links: Sequence[Link], measure: Callable[[Sequence[Way]], Sequence[Link]]) -> list[Link]:
    """Return the links, each slow or late one measured repeatedly until it no longer is, at most `TIMES` times.

    A link gets the best of its measurements. Links in one call of `measure` share no node.
    """
    found = {(link.sender, link.receiver): link for link in links}
    times = Counter[Way](found.keys())
    while doubtful := [way for way in _doubtful(list(found.values())) if times[way] < TIMES]:
        times.update(doubtful)
        for ways in _apart(doubtful):
            for link in measure(ways):
                way = link.sender, link.receiver
                found[way] = link if link.failure else _best(found[way], link)
    return list(found.values())


def _doubtful(links: Sequence[Link]) -> list[Way]:
    rates = rates_of(links)
    nodes = slow_nodes(rates)
    of_nodes = [way for node in nodes for way in sorted(node.ways)]
    alone = [way for way, _, _ in slow_alone(rates, nodes)]
    return list(dict.fromkeys([*of_nodes, *alone, *((link.sender, link.receiver) for link in late(links))]))


def _apart(ways: Sequence[Way]) -> Iterator[list[Way]]:
    """Yield groups of links in which each node occurs at most once."""
    left = list(ways)
    while left:
        group, others, ends = list[Way](), list[Way](), set[str]()
        for way in left:
            if ends.isdisjoint(way):
                group.append(way)
                ends.update(way)
            else:
                others.append(way)
        yield group
        left = others


def _best(one: Link, other: Link) -> Link:
    return replace(
        one, gbyte_per_s=max(one.gbyte_per_s, other.gbyte_per_s), latency_s=min(one.latency_s, other.latency_s)
    )


def _median_without(ordered: Sequence[float], places: Sequence[int]) -> float | None:
    """The median of sorted values without those at `places` (ascending); None if no others remain."""
    count = len(ordered) - len(places)
    if not count:
        return None
    return (_value_without(ordered, places, (count - 1) // 2) + _value_without(ordered, places, count // 2)) / 2


def _value_without(ordered: Sequence[float], places: Sequence[int], index: int) -> float:
    for place in places:
        if place > index:
            break
        index += 1
    return ordered[index]
