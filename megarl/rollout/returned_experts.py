"""Converts the experts that engines return to records; engines return experts even for layers that have none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from megarl.data.stretches import Values
from megatron_ext.routing.routed_experts import Routing, layers_with_experts


class ReturnedExperts(NamedTuple):
    """How the rows that an engine returns for a model are laid out.

    Example: ReturnedExperts(Routing(layers=58, topk=8, experts=256), layers=[3, 4, ..., 60], all_layers=61)
    """

    routing: Routing
    layers: Sequence[int]
    """The indices of the layers that have experts."""
    all_layers: int

    @classmethod
    def of(cls, model_path: Path) -> "ReturnedExperts":
        """Read the layout from a HuggingFace folder. Raises UserError if the model has no experts."""
        architecture = read_architecture(read_json(model_path / CONFIG))
        layers = layers_with_experts(architecture.transformer_config, architecture.num_layers)
        routing = Routing.of(architecture.transformer_config, architecture.num_layers)
        return cls(routing, layers, architecture.num_layers)

    def records(self, rows: Sequence[npt.NDArray[Any]], tokens: int) -> Values:
        """The records of the `tokens` of a prompt and its response, from the rows of the tokens that were fed.

        Tokens without a row get empty records. Raises RuntimeError if there are too many rows.
        """
        shape = (0, self.all_layers, self.routing.topk)
        together = np.concatenate(rows) if rows else np.empty(shape, np.uint8)
        if len(together) >= tokens:
            raise RuntimeError(f"an engine returned the experts of {len(together)} tokens, and fed less than {tokens}")
        return (self.routing.records(together[:, self.layers], tokens),)
