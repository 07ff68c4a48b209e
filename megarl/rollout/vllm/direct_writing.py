"""Weights written straight into the parameters of a vLLM worker, without vLLM's loader."""

from typing import Any

from converters.layouts.traced_layout import local_tensors
from megarl.resharding.direct.connections import Address
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.rollout.vllm.tracing import after_direct_write, loaded_parameters


class DirectWriter:
    """Worker `worker` of engine `replica`, as a destination of the `spec`. After an error only `close` is left."""

    def __init__(self, model: Any, model_config: Any, spec: TransferSpec, replica: int, worker: int) -> None:
        self._model = model
        self._model_config = model_config
        rank = replica * len(spec.traces) + worker
        tensors = local_tensors(loaded_parameters(model), spec.traces[worker].shard)
        self._destination = Destination(rank, spec.incoming(rank), tensors)

    @property
    def address(self) -> Address:
        """Where neighbours that pass something on find this worker."""
        return self._destination.address

    def connect(self, rendezvous: Rendezvous) -> None:
        """Meet the trainer's ranks, and the workers that pass something on. Raises TransferError as `Destination`."""
        try:
            self._destination.connect(rendezvous)
        except BaseException:
            self.close()
            raise

    def receive(self, version: int) -> None:
        """Write the weights of `version` and what vLLM derives from them. Raises TransferError as `Destination`."""
        self._destination.receive(version)
        after_direct_write(self._model, self._model_config)

    def compare(self, version: int) -> set[str]:
        """The parameters that are not as `receive` would leave them; nothing is written."""
        return self._destination.compare(version)

    def close(self) -> None:
        """Leave the peers."""
        self._destination.close()
