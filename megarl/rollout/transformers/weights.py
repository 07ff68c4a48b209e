"""The weights of a transformers model by their names in a checkpoint, as views of its memory.

transformers merges tensors of a checkpoint on loading, such as the experts of a layer, and splits them on saving.
Tracing the split without values shows where each tensor of the checkpoint is stored.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from converters.errors import UserError
from converters.layout import Shape
from converters.layouts.load_tracer import LoadTracer, UntraceableError
from converters.layouts.traced_layout import LoadTrace, trace_loading


class ModelWeights:
    """See `megarl.resharding.direct.weight_receiver.ReceivingModel`: its parameters are the checkpoint's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._views = _checkpoint_views(model)

    def loaded_parameters(self) -> Mapping[str, Tensor]:
        """See `ReceivingModel.loaded_parameters`."""
        return self._views

    def after_direct_write(self) -> None:
        """See `ReceivingModel.after_direct_write`: does nothing, as nothing is derived from weights."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of a checkpoint into the model. Raises ValueError for one that the model does not have."""
        for name, tensor in tensors:
            if name not in self._views:
                raise ValueError(f"the model has no {name}")
            view = self._views[name]
            if view.shape != tensor.shape:
                raise ValueError(f"the model has {name} with shape {list(view.shape)}, not {list(tensor.shape)}")
            view.copy_(tensor)

    def trace(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> LoadTrace:
        """Trace the tensors of a checkpoint: each is a parameter of its own."""
        return trace_loading(self.load, self._views, hf_shapes, hf_dtypes)


def _checkpoint_views(model: PreTrainedModel) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    seen: set[int] = set()
    # Tied weights are one tensor with several names; a checkpoint has only the first.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = tensor.detach()
    tracer = LoadTracer({}, {})
    try:
        with tracer:
            followed = {name: tracer.follow(name, tensor.shape, tensor.dtype) for name, tensor in held.items()}
            parts = revert_weight_conversion(model, followed)
    except UntraceableError as error:
        raise UserError(
            f"the transformers engine cannot be given weights of a {model.config.model_type} model: to save {error},"
            " transformers computes with its values; use another rollout.engine"
        ) from error
    views = {}
    for name, part in parts.items():
        held_name, box = tracer.origin(part)
        views[name] = held[held_name][box.slices()].view(part.shape)
    return views
