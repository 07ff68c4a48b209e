"""Extension of a vLLM worker process by megarl.

vLLM imports the module of its argument `worker_extension_cls` in every worker before it builds the model. This import
is the only hook at that moment, so here, and nowhere else, importing has effects.
"""

from collections.abc import Mapping

import torch
from vllm.platforms import current_platform

from converters.layout import Shape
from converters.layouts.traced_layout import LoadTrace
from megarl.resharding.direct.connections import Address, TransferError
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.rollout.vllm import cpu, routers, tracing, weight_transfer
from megarl.rollout.vllm.direct_writing import DirectWriter

weight_transfer.register()
routers.keep_logits_in_float32()
if current_platform.is_cpu():
    cpu.install()


class WorkerExtension:
    """Methods that vLLM adds to its worker class.

    Methods of a transfer return the reason if it fails: an exception in a vLLM process arrives as something else.
    """

    _direct_writer: DirectWriter | None = None

    def abort_weight_update(self) -> None:
        """End an update that failed on another worker or before it was complete, so that a new one can begin."""
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> LoadTrace:
        """Where the tensors of a HuggingFace checkpoint lie in this worker (`tracing.trace_model`)."""
        return tracing.trace_model(self.get_model(), hf_shapes, hf_dtypes)  # type: ignore[attr-defined]

    def open_transfer(self, spec: TransferSpec, replica: int) -> Address:
        """Prepare to be written straight into the parameters; where neighbours that pass something on find this one."""
        self.close_transfer()
        model, config, worker = self.get_model(), self.model_config, self.rank  # type: ignore[attr-defined]
        self._direct_writer = DirectWriter(model, config, spec, replica, worker)
        return self._direct_writer.address

    def connect_transfer(self, rendezvous: Rendezvous) -> str | None:
        """See `DirectWriter.connect`."""
        try:
            self._writer().connect(rendezvous)
        except TransferError as error:
            self.close_transfer()
            return str(error)
        return None

    def receive_transfer(self, version: int) -> str | None:
        """See `DirectWriter.receive`."""
        try:
            self._writer().receive(version)
        except TransferError as error:
            self.close_transfer()
            return str(error)
        return None

    def compare_transfer(self, version: int) -> set[str] | str:
        """See `DirectWriter.compare`."""
        try:
            return self._writer().compare(version)
        except TransferError as error:
            self.close_transfer()
            return str(error)

    def close_transfer(self) -> None:
        """Free what a transfer holds."""
        if self._direct_writer is not None:
            self._direct_writer.close()
            self._direct_writer = None

    def _writer(self) -> DirectWriter:
        if self._direct_writer is None:
            raise TransferError("the engine is not connected for a transfer")
        return self._direct_writer
