"""The receiving side of an engine's worker: weights straight into its parameters, whatever the engine is."""

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
    """The model of one worker, as an engine shows it to the receiver."""

    def loaded_parameters(self) -> Mapping[str, Tensor]:
        """The parameters that the engine's loader fills, by the names that its trace has for them."""

    def after_direct_write(self) -> None:
        """Recompute what the engine derives from weights, after these were written past its loader."""


class WeightReceiver:
    """Worker number `worker` of an engine, as a destination of direct transfers, one after the other.

    It is connected for none after an error of any method.
    """

    def __init__(self, model: ReceivingModel, worker: int) -> None:
        self._model = model
        self._worker = worker
        self._destination: Destination | None = None
        self._is_disconnected = False
        self._still_read: list[RecvEndpoint] = []
        """Endpoints of transfers that are closed, into whose memory something may still be read."""

    def open(self, spec: TransferSpec, replica: int) -> Address:
        """Prepare to be written along `spec`, of which the engine is number `replica`; an earlier transfer is closed.

        Where neighbours that pass something on find this worker.
        """
        self.close()
        # A read that a lost machine does not answer ends by itself, over InfiniBand after eight seconds.
        self._still_read = [each for endpoint in self._still_read for each in endpoint.close()]
        rank = replica * len(spec.traces) + self._worker
        tensors = local_tensors(self._model.loaded_parameters(), spec.traces[self._worker].shard)
        messages = spec.incoming(rank)
        staging = Staging(spec.quantised[self._worker] if spec.quantised else None, messages, tensors)
        self._destination = Destination(rank, messages, tensors, staging)
        self._is_disconnected = False
        return self._destination.address

    def connect(self, rendezvous: Rendezvous) -> None:
        """Meet the trainer's ranks, and the workers that pass something on. Raises TransferError as `Destination`."""
        self._of_transfer(lambda destination: destination.connect(rendezvous))

    def receive(self, version: int) -> None:
        """Let the weights of `version` be written, and what the engine derives from them. Raises TransferError."""
        self._of_transfer(lambda destination: destination.receive(version))
        self._model.after_direct_write()

    def compare(self, version: int) -> set[str]:
        """The parameters that `receive` would change; nothing is written. Raises TransferError."""
        return self._of_transfer(lambda destination: destination.compare(version))

    def has_rdma_port(self) -> bool:
        """Whether this machine has a port of InfiniBand, RoCE or EFA that is up."""
        return has_port()

    def has_nixl(self) -> bool:
        """Whether this worker's environment, which may be of its engine's own, has what rdma needs."""
        return is_installed()

    def gpudirect_obstacle(self) -> str:
        """Why network cards do not reach the memory of GPUs, if they do not. See `gpudirect.gpudirect_obstacle`."""
        return gpudirect_obstacle()

    def disconnect(self) -> None:
        """Let go of what others gave for the transfer that was opened, if any, before they free it.

        Neighbours may map what this worker gave them until `close`.
        """
        self._is_disconnected = True
        if self._destination is not None:
            self._still_read += self._destination.disconnect()

    def close(self) -> None:
        """Free what belongs to the transfer that was opened, if any, when neighbours have let go of it."""
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
    """The result of a method of a worker's receiver, or why it failed: exceptions do not get through every engine.

    `results` of all workers are for the engine to return.
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
