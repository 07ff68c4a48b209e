"""What megarl adds to a vLLM worker process.

vLLM imports the module of its argument `worker_extension_cls` in every worker before it builds the model. This import
is the only hook at that moment, so here, and nowhere else, importing has effects.
"""

from collections.abc import Mapping

import torch
from vllm.platforms import current_platform

from converters.layout import Shape
from converters.layouts.recorded import Recording
from megarl.rollout.vllm import cpu, recording, weight_transfer

weight_transfer.register()
if current_platform.is_cpu():
    cpu.install()


class WorkerExtension:
    """Methods that vLLM adds to its worker class."""

    def abandon_weight_update(self) -> None:
        """End an update that failed on another worker or before it was complete, so that a new one can begin."""
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]

    def record_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> Recording:
        """Where the tensors of a HuggingFace checkpoint lie in this worker (`recording.record_model`)."""
        return recording.record_model(self.get_model(), hf_shapes, hf_dtypes)  # type: ignore[attr-defined]
