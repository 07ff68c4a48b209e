"""Fills the single LoRA slot of a vLLM engine with the trained adapter; the base weights stay as loaded."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from megarl.resharding.loader.buckets import loadable
from megarl.rollout.vllm.weight_transfer import BucketWritten, SharedMemoryTransfer

BACKEND = "shm_adapter"
_NAME, _NUMBER = "trained", 1


class AdapterTransfer(SharedMemoryTransfer):
    """Receives an adapter on one worker, by PEFT's names; buckets are kept until `fill_slot`."""

    def start_weight_update(self) -> None:
        """Discard what arrived of an unfinished update."""
        self._tensors: dict[str, Tensor] = {}

    def receive_weights(self, update_info: BucketWritten) -> None:
        """Keep the tensors of one bucket."""
        bucket = update_info.bucket
        self._tensors |= loadable(bucket, self._memories[bucket.segment])

    def finish_weight_update(self) -> None:
        """Do nothing: vLLM empties the slot right afterwards."""

    def fill_slot(self, model: Any, alpha: float) -> None:
        """Put the received adapter into the empty slot of `model`; vLLM takes this worker's shard of each matrix.

        Raises RuntimeError for a matrix that the engine has no place for, which vLLM would silently skip.
        """
        manager, tensors, self._tensors = model.lora_manager, self._tensors, {}
        rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A.weight"))
        adapter = LoRAModel.from_lora_tensors(
            _NUMBER,
            tensors,
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
        )
        for name, matrices in manager.packed_modules.items():
            if isinstance(manager.modules[name], FusedMoEWithLoRA):
                _complete(adapter.loras, matrices)
        with torch.no_grad():
            manager.add_adapter(adapter)
            manager.activate_adapter(_NUMBER)
        if unplaced := sorted(adapter.loras.keys() - manager.modules.keys()):
            raise RuntimeError(f"the engine has no place for the adapter of {unplaced[0]}, one of {len(unplaced)}")


def _complete(loras: MutableMapping[str, LoRALayerWeights], matrices: list[str]) -> None:
    """Add zero adapters to matrices of adapted experts that lack one; `matrices` go gate, down, up, gate, ...

    vLLM packs all three matrices of an expert, and raises if one is missing.
    """
    for start in range(0, len(matrices), 3):
        gate, down, up = matrices[start : start + 3]
        of_expert = [name for name in (gate, up, down) if name in loras]
        if not of_expert:
            continue
        like = loras[of_expert[0]]
        opposite = like.lora_b.new_zeros(like.rank, len(like.lora_b)), like.lora_a.new_zeros(like.input_dim, like.rank)
        alike = torch.zeros_like(like.lora_a), torch.zeros_like(like.lora_b)
        for name in {gate, up, down} - set(of_expert):
            zeros = alike if (name == down) == (of_expert[0] == down) else opposite
            loras[name] = LoRALayerWeights(name, like.rank, like.lora_alpha, *zeros)


def lora_request() -> LoRARequest:
    """The part of a request that selects the slot's adapter. It names no real folder, as only refits fill the slot."""
    return LoRARequest(_NAME, _NUMBER, lora_path="(filled by refits)")


def register() -> None:
    """Register the backend with vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, AdapterTransfer)
