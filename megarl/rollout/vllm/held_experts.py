"""The experts that a vLLM worker holds; with expert parallelism, its loaders should not see the others.

In vLLM 0.32 a layer is complete with the last expert that its worker holds, and its kernel then restores its own
parameters, some under other names and some without a loader. Another worker's expert that comes later cannot be loaded,
and the update fails. One that comes earlier is kept in memory until the layer is complete.
"""

from collections.abc import Set
from dataclasses import replace

from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.ep_weight_filter import parse_expert_id

from megarl.resharding.loader.buckets import Bucket


def experts_held(model: nn.Module) -> Set[int]:
    """The indices of the experts that any layer of `model` holds; empty for a model without experts."""
    layers = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return {number for layer in layers for number in layer.expert_map_manager.get_local_expert_ids()}


def without_others(bucket: Bucket, held: Set[int]) -> Bucket:
    """`bucket` without the experts that are not `held`, and without their scales."""
    if not held:
        return bucket
    numbers = (parse_expert_id(entry.name) for entry in bucket.entries)
    entries = zip(bucket.entries, numbers, strict=True)
    return replace(bucket, entries=tuple(entry for entry, number in entries if number is None or number in held))
