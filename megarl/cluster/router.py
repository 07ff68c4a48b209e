"""Requests over engines: each to the least loaded that serves, and on to another if that one dies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from converters.number_formats import NumberFormat
from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.heartbeat import INTERVAL_S, Heartbeat
from megarl.cluster.restarts import Restarts, say
from megarl.cluster.streams import End, Stream, next_of
from megarl.data import Turn
from megarl.rollout.protocol import Engine, Request


@dataclass(frozen=True)
class SharedByEngines:
    """State that all engines of a run have in common, and any part of them."""

    restarts: Restarts
    number_format: NumberFormat | None = None
    """The one in which they hold the weights, if not as these are trained."""
    routing: Lock = field(default_factory=Lock)


class _Share:
    """Requests that one engine was asked: `left` has the places of those that it has not answered, by their numbers."""

    def __init__(self, handle: EngineHandle, places: Sequence[int]) -> None:
        self.handle = handle
        self.left = dict(enumerate(places))


class Router:
    """Sends requests to engines that are alike."""

    def __init__(self, handles: Sequence[EngineHandle], shared: SharedByEngines) -> None:
        self._handles, self._restarts, self._routing = handles, shared.restarts, shared.routing

    def generate_each(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Turn]]]:
        """See `Engines.generate_each`."""
        waiting, shares = list(range(len(requests))), dict[Stream, _Share]()
        heartbeat = Heartbeat(self._handles)
        try:
            while waiting or shares:
                self._restarts.bring_back()
                if waiting:
                    waiting = self._ask(requests, waiting, shares)
                found = next_of(list(shares), self._restarts.calls, INTERVAL_S)
                for handle in heartbeat.dead(busy=[share.handle for share in shares.values()]):
                    self._restarts.begin(handle)
                if found is None:
                    continue
                stream, result = found
                if isinstance(result, End):
                    waiting += self._ended(shares, stream, result, requests)
                    continue
                index, turns = result
                place = shares[stream].left.pop(index)
                self.add_load(shares[stream].handle, -requests[place].sampling.samples)
                yield place, turns
        finally:
            for share in shares.values():
                self._forget(share, requests)

    def route(self, requests: Sequence[Request]) -> dict[EngineHandle, list[int]]:
        """The places of the requests that each engine gets; of none while one has to be waited for.

        It depends on the loads alone, so that engines that were idle get the same requests whenever they are asked.
        """
        shares: dict[EngineHandle, list[int]] = {}
        with self._routing:
            for place, request in enumerate(requests if (able := self._able()) else ()):
                handle = min(able, key=lambda each: each.load)
                handle.load += request.sampling.samples
                shares.setdefault(handle, []).append(place)
        return shares

    def add_load(self, handle: EngineHandle, samples: int) -> None:
        """Note that an engine has so many samples more to give."""
        with self._routing:
            handle.load += samples

    def _able(self) -> Sequence[EngineHandle]:
        """The engines that may be asked."""
        if serving := [handle for handle in self._handles if handle.state == "serving"]:
            return serving
        # Where none serves, requests wait for the end of an update, or else for an engine that is started anew.
        if (up := [handle for handle in self._handles if handle.is_up]) or self._restarts.calls:
            return up
        # A failure says what it was.
        return self._handles

    def _ask(self, requests: Sequence[Request], waiting: list[int], shares: dict[Stream, _Share]) -> list[int]:
        """Begin to ask what waits; what goes on waiting."""
        routed = self.route([requests[place] for place in waiting])
        for handle, numbers in routed.items():
            places = [waiting[number] for number in numbers]
            shares[handle.stream(Engine.generate_each, [requests[place] for place in places])] = _Share(handle, places)
        return [] if routed else waiting

    def _ended(self, shares: dict[Stream, _Share], stream: Stream, end: End, requests: Sequence[Request]) -> list[int]:
        """The places of requests to ask again, because their engine died. Raises what else failed.

        They are asked from their start: their seeds are the same, and so are the tokens. All that was sampled of an
        unfinished request is lost with its engine.
        """
        share = shares.pop(stream)
        self._forget(share, requests)
        if end.failure is None:
            return []
        # Its process is another one already if this death was heard of before.
        if stream.worker is share.handle.worker:
            if share.handle.state != "down":
                raise end.failure
            self._restarts.begin(share.handle)
        if share.left:
            say(f"{share.handle.name} had not answered {len(share.left)} requests: they are asked again")
        return list(share.left.values())

    def _forget(self, share: _Share, requests: Sequence[Request]) -> None:
        """An engine owes nothing of a share any more."""
        self.add_load(share.handle, -sum(requests[place].sampling.samples for place in share.left.values()))
