"""The receiving side of an engine worker: writes weights straight into its parameters, for any engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from torch import Tensor

from converters.layouts.traced_layout import local_tensors
from megarl.process.gpudirect import gpudirect_obstacle
from megarl.resharding.direct.connections import Address, TransferError
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.staging import Staging
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import RecvEndpoint, Rendezvous
from megarl.resharding.direct.transports.nixl_agent import has_port, is_installed
from megarl.resharding.direct.wire import Failure

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class ReceivingModel(Protocol):
    """The model of one worker, as the receiver sees it."""

    def loaded_parameters(self) -> Mapping[str, Tensor]:
        """The parameters that the engine's loader fills, by their names in its trace."""

    def after_direct_write(self) -> None:
        """Recompute everything that the engine derives from weights, as they were written without its loader."""


class WeightReceiver:
    """Worker number `worker` of an engine, as the destination of one direct transfer after the other.

    After any method fails, it is disconnected until the next `open`.
    """

    def __init__(self, model: ReceivingModel, worker: int) -> None:
        self._model = model
        self._worker = worker
        self._destination: Destination | None = None
        self._is_disconnected = False
        self._still_read: list[RecvEndpoint] = []
        """Endpoints of closed transfers into whose memory reads may still be in flight."""

    def open(self, spec: TransferSpec, replica: int) -> Address:
        """Prepare for the transfer of `spec`, as engine number `replica`; an earlier transfer is closed.

        Returns the address at which neighbours that receive relays find this worker.
        """
        self.close()
        # A read from a lost machine ends by itself; over InfiniBand that takes eight seconds.
        self._still_read = [each for endpoint in self._still_read for each in endpoint.close()]
        rank = replica * len(spec.traces) + self._worker
        tensors = local_tensors(self._model.loaded_parameters(), spec.traces[self._worker].shard)
        messages = spec.incoming(rank)
        staging = Staging(spec.quantised[self._worker] if spec.quantised else None, messages, tensors)
        self._destination = Destination(rank, messages, tensors, staging)
        self._is_disconnected = False
        return self._destination.address

    def connect(self, rendezvous: Rendezvous) -> None:
        """Connect to the trainer's ranks and to neighbours that relay.

        Raises TransferError as `Destination.connect`.
        """
        self._of_transfer(lambda destination: destination.connect(rendezvous))

    def receive(self, version: int) -> None:
        """Receive the weights of `version`, and recompute everything derived from them. Raises TransferError."""
        self._of_transfer(lambda destination: destination.receive(version))
        self._model.after_direct_write()

    def compare(self, version: int) -> set[str]:
        """The names of parameters that `receive` would change; writes nothing. Raises TransferError."""
        return self._of_transfer(lambda destination: destination.compare(version))

    def has_rdma_port(self) -> bool:
        """Whether this machine has a port of InfiniBand, RoCE or EFA that is up."""
        return has_port()

    def has_nixl(self) -> bool:
        """Whether NIXL, which rdma needs, is installed in this worker's environment, which may be the engine's own."""
        return is_installed()

    def gpudirect_obstacle(self) -> str:
        """Why network cards do not reach the memory of GPUs, if they do not. See `gpudirect.gpudirect_obstacle`."""
        return gpudirect_obstacle()

    def disconnect(self) -> None:
        """Release the peers' memory of the open transfer, if any, before they free it.

        Neighbours may map this worker's own memory until `close`.
        """
        self._is_disconnected = True
        if self._destination is not None:
            self._still_read += self._destination.disconnect()

    def close(self) -> None:
        """Free the memory of the open transfer, if any; neighbours must have unmapped it before."""
        if self._destination is not None:
            self._still_read += self._destination.close()
            self._destination = None

    def _of_transfer(self, action: Callable[[Destination], R]) -> R:
        if self._destination is None or self._is_disconnected:
            raise TransferError("the engine is not connected for a transfer")
        try:
            return action(self._destination)
        except BaseException:
            self.disconnect()
            raise


def outcome(method: Callable[[WeightReceiver, *Ts], R], receiver: WeightReceiver, *arguments: *Ts) -> R | Failure:
    """Call a method of a worker's receiver; return its result, or a `Failure`: not all engines propagate exceptions.

    The engine passes the outcomes of all workers to `results`.
    """
    try:
        return method(receiver, *arguments)
    except TransferError as error:
        return Failure(str(error))


def results(outcomes: Sequence[Any]) -> list[Any]:
    """The outcomes of all workers. Raises TransferError if one of them failed."""
    for each in outcomes:
        if isinstance(each, Failure):
            raise TransferError(each.reason)
    return list(outcomes)
