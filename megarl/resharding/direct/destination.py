"""A destination rank: receives from sources, relays to its neighbours on the node, and receives their relays.

Elements that several ranks of a node need enter the node once (`Plan.node_once`): each rank gets a part from the
sources and relays it, message by message as it arrives, through memory that the ranks of the node map.
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
    """Destination rank `rank` of every refit: `messages` says what is written to its `tensors` and what it relays.

    `connect` connects it with its peers. After any method fails, only `disconnect` and `close` may be called. Raises
    ValueError if a relayed message contains something that no source sends.
    """

    def __init__(
        self,
        rank: int,
        messages: DestinationMessages,
        tensors: Mapping[str, Tensor],
        staging: Staging | None = None,
    ) -> None:
        """`staging` holds the tensors that arrive as values, and quantises them when they are complete."""
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
        # Done here in one thread: the receiving and relaying threads could launch the same kernel for the first time at
        # once.
        for each in (self._from_sources, self._from_neighbours, self._to_neighbours):
            if each is not None:
                each.load_kernels()

    def receive(self, version: int) -> None:
        """Receive and write all weights of `version`. Raises TransferError as `Receiver.receive`."""
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
        """Close the links and unmap the peers' memory. Neighbours may map this rank's own memory until `close`.

        Returns the endpoints that must be closed again later; see `RecvEndpoint.close`.
        """
        self._to_neighbours.disconnect()
        receivers = filter(None, (self._from_sources, self._from_neighbours))
        return [each for receiver in receivers for each in receiver.close()]

    def close(self) -> Sequence[RecvEndpoint]:
        """Close the links and free all memory, except that of the returned endpoints.

        Neighbours must have unmapped it before.
        """
        kept = self.disconnect()
        self._to_neighbours.close()
        return kept

    def _take(self, version: int, take: Callable[[Receiver], None]) -> None:
        assert self._from_sources is not None
        # Wait for work queued on the device: it may still read or write the tensors.
        device.synchronize()
        self._readiness.expect()
        moving: list[Callable[[], object]] = [partial(take, self._from_sources)]
        if self._from_neighbours is not None:
            moving.append(partial(take, self._from_neighbours))
        if self._messages.relays_out:
            moving.append(partial(self._to_neighbours.send_as_ready, version, self._readiness.ready))
        self._at_once(moving)

    def _at_once(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run the tasks concurrently. If one fails, the others are aborted, and the original error is raised."""
        if len(tasks) == 1:
            tasks[0]()
            return
        with ThreadPoolExecutor(len(tasks)) as pool:
            running = as_completed([pool.submit(device.with_device(task)) for task in tasks])
            failed = [task for task in running if self._has_failed(task)]
        # Keep no reference to an error here: its traceback keeps frames alive, and with them memory that must be freed.
        if failed:
            # The original error is not always that of the task that ended first: while it notifies its peers, their
            # answers may already end other tasks.
            failed.sort(key=lambda task: raised_s(task.exception()), reverse=True)
            failed.pop().result()

    def _has_failed(self, task: Future[object]) -> bool:
        """Return whether a finished task failed; if so, abort all other tasks and notify the peers."""
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
    """The rendezvous for relays within nodes, in which destination ranks are the senders."""
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
