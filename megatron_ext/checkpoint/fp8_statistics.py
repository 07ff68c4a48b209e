"""Transformer Engine's FP8 statistics in checkpoints (`_extra_state`): reads the pickles without running code.

Transformer Engine's modules unpickle what they are given. Delayed scaling continues with the scales and maxima of
former steps, so it is given a fresh pickle of these, with the configured recipe. Other recipes, and training without
FP8, keep no statistics and are given nothing.
"""

import pickle
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.formats.torch_dist.unpickling import SafeUnpickler

EXTRA_STATE = "_extra_state"
"""Part of the key of a module's statistics."""
_NONE = torch.empty(0, dtype=torch.uint8)
_VARIABLES, _HISTORY = "extra_fp8_variables", "amax_history_"


def are_kept(config: TransformerConfig) -> bool:
    """Whether training goes on with the statistics of a checkpoint."""
    return bool(config.fp8) and config.fp8_recipe == "delayed"


def without_statistics(parts: Mapping[str, Any]) -> dict[str, Any]:
    """A chunk's sharded state dict with only its weights."""
    return {key: part for key, part in parts.items() if not isinstance(part, ShardedObject)}


def require_readable(stored: Any) -> None:
    """Raise UnpicklingError unless an object that torch loaded from a checkpoint is statistics, or empty."""
    for each in nested_values([stored]):
        if each is not None:
            _read(each)


def repickled(loaded: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """The state `loaded` for a chunk, with all statistics replaced by fresh pickles."""
    kept = [key for key, value in loaded.items() if EXTRA_STATE in key and value is not None]
    return {**loaded, **{key: with_recipe(loaded[key], fp8_utils.get_fp8_recipe(config)) for key in kept}}


def with_recipe(stored: Tensor, recipe: Any) -> Tensor:
    """Make statistics for a module with this `recipe` of delayed scaling from the tensors and numbers in `stored`.

    Statistics of another recipe give empty ones. Raises UnpicklingError for anything else.
    """
    state = _read(stored)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        return _NONE
    fitted = {
        name: _with_rows(value, recipe.amax_history_len) if name.startswith(_HISTORY) else value.clone()
        for name, value in tensors.items()
    }
    variables = {name: value for name, value in state[_VARIABLES].items() if _is_plain(value)}
    return torch.frombuffer(
        bytearray(pickle.dumps({"recipe": recipe, **fitted, _VARIABLES: variables})), dtype=torch.uint8
    )


def _with_rows(history: Tensor, rows: int) -> Tensor:
    """Resize a history to `rows` steps, as Transformer Engine does."""
    kept = history[:rows]
    return torch.cat([kept, kept.new_zeros(rows - len(kept), *kept.shape[1:])])


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in (bool, int, float, str)


def _read(stored: Any) -> dict[str, Any]:
    """Unpickle statistics without running code: everything but tensors and plain values becomes an inert record.

    Raises UnpicklingError for anything that is not the bytes of statistics.
    """
    if not isinstance(stored, Tensor) or stored.dtype != torch.uint8:
        raise pickle.UnpicklingError(f"FP8 statistics are a {type(stored).__name__}, and no bytes")
    if not stored.numel():
        return {}
    try:
        state = SafeUnpickler(stored.numpy(force=True).tobytes(), more=_OF_TENSORS).load()
    # Invalid pickles raise errors of any kind.
    except Exception as error:
        raise pickle.UnpicklingError(str(error)) from error
    if type(state) is not dict or type(state.get(_VARIABLES)) is not dict:
        raise pickle.UnpicklingError(f"FP8 statistics are a {type(state).__name__}, and no table with {_VARIABLES}")
    return state


def _load_storage(content: bytes) -> Any:
    """Load a tensor's values safely; torch's own function would run code pickled in them."""
    return torch.load(BytesIO(content), weights_only=True)


_OF_TENSORS: Mapping[tuple[str, str], Any] = {
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}
