"""A destination rank: what sources send to it, what it relays to its neighbours, and what they relay to it.

Elements that several ranks of a node want enter the node once (`Plan.node_once`): each rank gets a part from the
sources and relays it, message by message as it comes, through memory that the ranks of a node map.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial

from torch import Tensor

from megarl.resharding.direct.connections import Address, raised_s, reason_of
from megarl.resharding.direct.messages_by_peer import DestinationMessages
from megarl.resharding.direct.receiver import Receiver
from megarl.resharding.direct.relay_readiness import RelayReadiness
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.staging import Staging
from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT
from megarl.resharding.direct.transports.endpoint import RecvEndpoint, Rendezvous
from megarl.resharding.direct.wire import Announcement
from megatron_ext import device
from megatron_ext.loopback import LOOPBACK


class Destination:
    """The part of destination rank `rank` in every refit: `messages` says what comes into its `tensors` and goes on.

    `connect` brings it together with its peers; after an error of any method only `disconnect` and `close` are left.
    Raises ValueError for a relay of something that no source sends.
    """

    def __init__(
        self,
        rank: int,
        messages: DestinationMessages,
        tensors: Mapping[str, Tensor],
        staging: Staging | None = None,
    ) -> None:
        """`staging` has the tensors of which values come, and quantises them when all is there."""
        self._rank = rank
        self._messages = messages
        self._staging = staging
        self._tensors = tensors = {**tensors, **(staging.tensors if staging else {})}
        self._readiness = RelayReadiness(messages)
        self._to_neighbours = Sender(rank, messages.relays_out, tensors, LOOPBACK)
        self._from_sources: Receiver | None = None
        self._from_neighbours: Receiver | None = None

    @property
    def address(self) -> Address:
        """The address at which neighbours find this rank."""
        return self._to_neighbours.address

    def connect(self, rendezvous: Rendezvous) -> None:
        """Connect with all sources and neighbours. Raises TransferError as `Sender.connect` and `Receiver.connect`."""
        messages = self._messages
        inside = _inside_nodes(rendezvous)
        self._readiness.timeout_s = rendezvous.timeout_s
        self._from_sources = Receiver(self._rank, messages.direct, self._tensors, rendezvous, self._note)
        connecting: list[Callable[[], object]] = [self._from_sources.connect]
        if messages.relays_in:
            self._from_neighbours = Receiver(self._rank, messages.relays_in, self._tensors, inside)
            connecting.append(self._from_neighbours.connect)
        if messages.relays_out:
            connecting.append(partial(self._to_neighbours.connect, inside))
        else:
            self._to_neighbours.close()
        self._at_once(connecting)
        # In this thread, and not in those that take and pass on, of which two may need the same kernel at once.
        for each in (self._from_sources, self._from_neighbours, self._to_neighbours):
            if each is not None:
                each.load_kernels()

    def receive(self, version: int) -> None:
        """Write everything that belongs to `version`. Raises TransferError as `Receiver.receive`."""
        self._take(version, lambda receiver: receiver.receive(version))
        if self._staging is not None:
            self._staging.quantise()

    def compare(self, version: int) -> set[str]:
        """The names of tensors in which `receive` would change a byte; nothing is written. Raises as `receive`.

        This rank relays its own elements, right or wrong: a mismatch is reported only on the rank where it starts.
        """
        names: set[str] = set()
        staged = self._staging.tensors if self._staging is not None else {}
        self._take(version, lambda receiver: names.update(receiver.compare(version, staged)))
        return names | self._staging.differing() if self._staging is not None else names

    def disconnect(self) -> Sequence[RecvEndpoint]:
        """End the links and let go of what peers gave. Neighbours may map what this rank gave them until `close`.

        Returns the endpoints that are to be closed again later. See `RecvEndpoint.close`.
        """
        self._to_neighbours.disconnect()
        receivers = filter(None, (self._from_sources, self._from_neighbours))
        return [each for receiver in receivers for each in receiver.close()]

    def close(self) -> Sequence[RecvEndpoint]:
        """End the links and let go of all memory but that of the endpoints returned; neighbours have let go of it."""
        kept = self.disconnect()
        self._to_neighbours.close()
        return kept

    def _take(self, version: int, take: Callable[[Receiver], None]) -> None:
        assert self._from_sources is not None
        # Nothing that was asked of the device before may read or write the tensors any more.
        device.synchronize()
        self._readiness.expect()
        moving: list[Callable[[], object]] = [partial(take, self._from_sources)]
        if self._from_neighbours is not None:
            moving.append(partial(take, self._from_neighbours))
        if self._messages.relays_out:
            moving.append(partial(self._to_neighbours.send_as_ready, version, self._readiness.ready))
        self._at_once(moving)

    def _at_once(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Do all of them at the same time. Raises the error that began it, after which the others end, too."""
        if len(tasks) == 1:
            tasks[0]()
            return
        with ThreadPoolExecutor(len(tasks)) as pool:
            running = as_completed([pool.submit(device.with_device(task)) for task in tasks])
            failed = [task for task in running if self._has_failed(task)]
        # An error holds the frames that it passed, and what they hold is to be freed: nothing here may hold the error.
        if failed:
            # Not the task that ended first: while one still tells its peers, their answers may end the others.
            failed.sort(key=lambda task: raised_s(task.exception()), reverse=True)
            failed.pop().result()

    def _has_failed(self, task: Future[object]) -> bool:
        """Tell all other tasks and peers if a task that has ended did so with an error; returns whether it did."""
        error = task.exception()
        if error is None:
            return False
        reason = reason_of(error)
        self._readiness.fail(reason)
        self._to_neighbours.abort(reason)
        for receiver in (self._from_sources, self._from_neighbours):
            if receiver is not None:
                receiver.abort(reason)
        return True

    def _note(self, source: int, announcement: Announcement) -> None:
        self._readiness.add((source, announcement.number))


def _inside_nodes(rendezvous: Rendezvous) -> Rendezvous:
    """The rendezvous of neighbours, in which destination ranks send."""
    return replace(
        rendezvous,
        transport=MAPPED_MEMORY_TRANSPORT[device.backend()],
        listeners=rendezvous.relay_listeners,
        store=None,
        topology=None,
        with_changes=False,
        relay_listeners=(),
        senders="engine worker",
    )
