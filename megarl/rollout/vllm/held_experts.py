"""Experts that a vLLM worker holds: with expert parallelism a part of all, and loaders meet the others for nothing.

A layer of vLLM 0.32 is complete with the last expert that its worker holds: its kernel then has its parameters back,
some under other names and some without a loader. An expert of another worker that comes later finds nothing to be
loaded into, and the update fails. One that comes earlier is kept in memory until the layer is complete.
"""

from collections.abc import Set
from dataclasses import replace

from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.ep_weight_filter import parse_expert_id

from megarl.resharding.loader.buckets import Bucket


def experts_held(model: nn.Module) -> Set[int]:
    """The numbers of the experts that any layer of `model` has; none of a model without experts."""
    layers = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return {number for layer in layers for number in layer.expert_map_manager.get_local_expert_ids()}


def without_others(bucket: Bucket, held: Set[int]) -> Bucket:
    """`bucket` without the experts that are not `held`, scales and all."""
    if not held:
        return bucket
    numbers = (parse_expert_id(entry.name) for entry in bucket.entries)
    entries = zip(bucket.entries, numbers, strict=True)
    return replace(bucket, entries=tuple(entry for entry, number in entries if number is None or number in held))
