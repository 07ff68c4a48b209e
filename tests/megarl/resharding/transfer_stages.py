"""All ranks of a scene, each in a process, and the calls that a test makes of them."""

import multiprocessing
import secrets
from concurrent.futures import wait
from dataclasses import replace

from transfer_ranks import RankProcess

from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT, TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous

ANSWER_S = 250
"""Seconds in which ranks answer, also where many other processes share the cores and the first one imports torch."""


class Stage:
    """The ranks of a scene, all running; `calls` makes one call of each."""

    def __init__(self, scene, pool):
        self.scene = scene
        self._pool = pool
        self.processes = []
        made = {
            kind: [pool.submit(self._start, kind, rank) for rank in range(ranks)]
            for kind, ranks in (("source", scene.source.world_size), ("destination", scene.plan.destination_ranks))
        }
        self.sources, self.destinations = ([each.result(ANSWER_S) for each in ranks] for ranks in made.values())

    def _start(self, kind, rank):
        process = RankProcess(ctx=multiprocessing.get_context("forkserver"))
        process.start()
        self.processes.append(process)
        return getattr(process, kind)(self.scene, rank)

    def replace_destination(self, rank):
        """Let another process be this rank."""
        self.destinations[rank] = self._start("destination", rank)

    def begin(self, ranks, method, *arguments):
        return [self._pool.submit(getattr(rank, method), *arguments) for rank in ranks]

    def call(self, ranks, method, *arguments):
        return [each.result(ANSWER_S) for each in self.begin(ranks, method, *arguments)]

    def rendezvous(self, key=None, with_checksum=True, with_changes=False):
        scene = self.scene
        store = self.sources[0].store(scene.timeout_s) if TRANSPORTS[scene.transport].needs_store else None
        listeners = self.call(self.sources, "open")
        key = key or secrets.token_bytes(16)
        relay_listeners = self.call(self.destinations, "open")
        rendezvous = Rendezvous(
            scene.transport,
            key,
            listeners,
            store,
            len(self.destinations),
            scene.timeout_s,
            relay_listeners,
            with_checksum=with_checksum,
            with_changes=with_changes,
        )
        return (
            rendezvous
            if scene.transport in MAPPED_MEMORY_TRANSPORT.values()
            else replace(rendezvous, topology=scene.topology)
        )

    def begin_connect(self, rendezvous=None):
        rendezvous = rendezvous or self.rendezvous()
        return self.begin(self.sources, "connect", rendezvous) + self.begin(self.destinations, "connect", rendezvous)

    def connect(self, **options):
        for each in self.begin_connect(self.rendezvous(**options)):
            each.result(ANSWER_S)

    def connect_in_time(self):
        """Connect ranks that wait as briefly as the scene says, or longer where the machine is too busy for that."""
        for _ in range(4):
            calls = self.begin_connect()
            if not any(failures(calls)):
                return
            self.call([*self.sources, *self.destinations], "close")
            self.scene = replace(self.scene, timeout_s=3 * self.scene.timeout_s)
        raise AssertionError(f"the ranks do not meet within {self.scene.timeout_s / 3:g} s")

    def begin_refit(self, version):
        sending = self.begin(self.sources, "send", version)
        return sending + self.begin(self.destinations, "receive", version)

    def refit(self, version):
        return [each.result(ANSWER_S) for each in self.begin_refit(version)]

    def bytes_of_refit(self, version):
        """Fill the sources with a version, move it, see that it is there, and return the bytes that travelled."""
        self.call(self.sources, "fill", version)
        sent = self.refit(version)[: len(self.sources)]
        assert self.wrong(version) == [[]] * len(self.destinations)
        return sum(each.size_bytes for each in sent)

    def compare(self, version):
        """Parameters that differ on each destination."""
        calls = self.begin(self.sources, "send", version) + self.begin(self.destinations, "compare", version)
        return [each.result(ANSWER_S) for each in calls][len(self.sources) :]

    def wrong(self, version):
        return self.call(self.destinations, "wrong", version)

    def end(self):
        for process in self.processes:
            process._process.kill()
            process._process.join()


NO_END = "no end"


def failures(calls, timeout_s=ANSWER_S):
    """Error that each call raised, by type and message; "" where it did not, and `NO_END` where it goes on."""
    ended = wait(calls, timeout_s).done
    if len(ended) < len(calls):
        return [NO_END if call not in ended else "" for call in calls]
    errors = [call.exception() for call in calls]
    return [f"{type(error).__name__}: {error}" if error else "" for error in errors]
