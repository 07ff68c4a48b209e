"""Experts of tokens as engines return them, to records: they name some for every layer, also where there are none."""

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
    """Rows of a model: what they are.

    Example: ReturnedExperts(Routing(layers=58, topk=8, experts=256), layers=[3, 4, ..., 60], all_layers=61)
    """

    routing: Routing
    layers: Sequence[int]
    """The layers with experts, of all."""
    all_layers: int

    @classmethod
    def of(cls, model_path: Path) -> "ReturnedExperts":
        """Rows of the model of a HuggingFace folder. Raises UserError where it has no experts."""
        architecture = read_architecture(read_json(model_path / CONFIG))
        layers = layers_with_experts(architecture.transformer_config, architecture.num_layers)
        routing = Routing.of(architecture.transformer_config, architecture.num_layers)
        return cls(routing, layers, architecture.num_layers)

    def records(self, rows: Sequence[npt.NDArray[Any]], tokens: int) -> Values:
        """Records of the `tokens` of a prompt and its response, by the rows of those that were fed.

        Tokens beyond the rows have records that say nothing. Raises RuntimeError where there are too many rows.
        """
        shape = (0, self.all_layers, self.routing.topk)
        together = np.concatenate(rows) if rows else np.empty(shape, np.uint8)
        if len(together) >= tokens:
            raise RuntimeError(f"an engine returned the experts of {len(together)} tokens, and fed less than {tokens}")
        return (self.routing.records(together[:, self.layers], tokens),)
