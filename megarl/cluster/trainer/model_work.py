"""Cost of the passes of a Megatron job over its model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from converters.architectures import Head, read_architecture, with_head
from converters.cost.compute import PassFlops, forward_flops, update_flops
from converters.formats.safetensors import CONFIG, read_json
from megatron_ext.options.options import MegatronOptions

_NOTHING = PassFlops(per_token=0.0, per_square=0.0)


@dataclass(frozen=True)
class ModelWork:
    """FLOPs of passes over a model; zero before the model is built."""

    forward: PassFlops = _NOTHING
    reference: PassFlops = _NOTHING
    """Forward pass of the reference model."""
    update: PassFlops = _NOTHING

    @classmethod
    def of(cls, model_path: Path, head: Head, options: MegatronOptions) -> Self:
        """Compute the work of a HuggingFace folder's model with a head, trained with these options."""
        architecture = with_head(read_architecture(read_json(model_path / CONFIG)), head)
        adapter = None if options.adapter is None else options.adapter.lora
        return cls(
            forward=forward_flops(architecture, adapter),
            reference=forward_flops(architecture),
            update=update_flops(
                architecture,
                adapter,
                prediction_layers=options.mtp_training != "none",
                detached=options.mtp_training == "detached",
            ),
        )
