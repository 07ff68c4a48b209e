"""Fills the single LoRA slot of an SGLang worker with the trained adapter; the base weights stay as loaded."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megarl.rollout.protocol import UpdateError

_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused module in SGLang -> the HuggingFace modules that it combines."""
_BESIDE = {module: [each for each in joined if each != module] for joined in _JOINED.values() for module in joined}
"""Module -> the other modules that SGLang fuses with it."""
_JOINED_AS = {module: whole for whole, joined in _JOINED.items() for module in joined}
_PREFIX, _EXPERTS = "base_model.model.", ".experts"


class AdapterSlot:
    """The slot of a worker, in SGLang's LoRAManager `manager`, in which the adapter's name is already loaded."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        (self._reference,) = manager.lora_refs.values()
        self._config = manager.configs[self._reference.lora_id].hf_config
        self._tensors: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Discard what arrived of an unfinished update."""
        self._tensors = {}

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the A and B of some matrices, by PEFT's names."""
        self._tensors |= tensors

    def fill(self) -> None:
        """Put the received adapter into the slot; SGLang takes this worker's shard of each matrix.

        Raises UpdateError for a matrix that the engine has no place for.
        """
        manager, reference = self._manager, self._reference
        tensors, self._tensors = self._tensors, {}
        self._check_places(tensors)
        tensors |= zeros_beside(tensors, self._rows_of_joined())
        _check(manager.unload_lora_adapter(reference))
        _check(manager.load_lora_adapter_from_tensors(reference, tensors, self._config))
        try:
            manager.fetch_new_loras({reference.lora_id})
        except ValueError as error:
            raise UpdateError(f"the adapter does not go into SGLang's slot: {error}") from error

    def _check_places(self, tensors: Iterable[str]) -> None:
        # Checked here because SGLang matches only the last part of a name, and silently skips what the layer does not
        # have.
        places = {name for modules in self._manager.lora_modules for name in modules}
        if unplaced := sorted(name for name in tensors if module_of(name) not in places):
            raise UpdateError(
                f"the adapter does not go into SGLang's slot: it has no place for {unplaced[0]}, one of {len(unplaced)}"
            )

    def _rows_of_joined(self) -> dict[str, int]:
        """The row counts of the matrices that attention fuses; gate and up have equal ones."""
        for modules in self._manager.lora_modules:
            for name, module in modules.items():
                if rows := _ROWS.get(name.rpartition(".")[-1]):
                    return rows(module)
        return {}


def _rows_of_heads(module: Any) -> dict[str, int]:
    layer = module.base_layer
    of_keys = layer.total_num_kv_heads * layer.head_size
    return {"q_proj": layer.total_num_heads * layer.head_size, "k_proj": of_keys, "v_proj": of_keys}


def _rows_of_latent(module: Any) -> dict[str, int]:
    of_queries = module.first_output_dim
    return {"q_a_proj": of_queries, "kv_a_proj_with_mqa": module.output_size - of_queries}


_ROWS = {"qkv_proj": _rows_of_heads, "fused_qkv_a_proj_with_mqa": _rows_of_latent}


def module_of(name: str) -> str:
    """SGLang's module for the adapter of a matrix; `name` is PEFT's name of its A or B."""
    parent, module, *_ = name.removeprefix(_PREFIX).rsplit(".", 3)
    experts, is_of_experts, number = parent.rpartition(f"{_EXPERTS}.")
    if is_of_experts and number.isdecimal():
        return experts + _EXPERTS
    return f"{parent}.{_JOINED_AS.get(module, module)}"


def zeros_beside(tensors: dict[str, Tensor], rows: dict[str, int]) -> dict[str, Tensor]:
    """Zero A and B for modules without an adapter that SGLang fuses with a module that has one.

    SGLang 0.5.23 fuses q_proj, k_proj and v_proj only if q_proj and v_proj are given. It raises KeyError for q_proj
    alone, and has no place for the others without q_proj, or for up_proj without gate_proj.
    """
    found = {}
    for name, tensor in tensors.items():
        *_, module, factor, _ = name.split(".")
        for other in _BESIDE.get(module, ()):
            if (absent := name.replace(f".{module}.", f".{other}.")) not in tensors:
                count = rows.get(other, len(tensor)) if factor == "lora_B" else len(tensor)
                found[absent] = tensor.new_zeros(count, tensor.shape[1])
    return found


def _check(done: Any) -> None:
    if not done.success:
        raise UpdateError(f"the adapter does not go into SGLang's slot: {done.error_message}")
