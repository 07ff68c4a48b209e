"""Transfers into engines that hold a number format: specifications of small models, and how their engines cut them."""

from functools import cache

import torch
from small_configs import make_config

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.layout import Placement, Shard
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import LoadTrace
from converters.number_formats import FP8_BLOCK, INT8_CHANNEL, MXFP8
from converters.topology import Topology
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.transfer_spec import TransferSpec

# Megatron's two groups of heads have 128 rows of queries each, and 64 of keys: half a block.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
BUCKET_BYTES = 100_000
ONE = ParallelSizes(world_size=1)
TENSOR = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
EXPERT = ParallelSizes(world_size=2, expert_model_parallel_size=2)


@cache
def architecture_of(family):
    return read_architecture(make_config(family, **SIZES, **(EXPERTS if family == "qwen3_moe" else {})))


def worker_trace(architecture, worker, workers, number_format):
    """An engine's worker: gate above up, rows of all others cut over the workers, but for those that are replicated."""
    shapes, dtypes = number_format.checkpoint(architecture)
    quantised = number_format.quantised_names(architecture)
    local_shapes, local_dtypes, placements, lengths = {}, {}, [], {}
    for name, shape in shapes.items():
        whole = Box.whole(shape)
        is_cut = len(shape) == 2 and name.removesuffix(number_format.scales_suffix) in quantised
        is_cut = is_cut and "k_proj" not in name and "v_proj" not in name and shape[0] % workers == 0
        if is_cut:
            rows = shape[0] // workers
            whole = Box((worker * rows, 0), ((worker + 1) * rows, shape[1]))
        local = name.replace("gate_proj", "gate_up").replace("up_proj", "gate_up")
        start = lengths.get(local, 0)
        lengths[local] = start + whole.shape[0]
        box = Box((start, *(0 for _ in shape[1:])), (lengths[local], *shape[1:]))
        local_shapes[local], local_dtypes[local] = (lengths[local], *shape[1:]), dtypes[name]
        placements.append(Placement(name, whole, local, box))
    return LoadTrace(Shard(local_shapes, placements), local_dtypes, [], {})


def make_spec(family, source, workers, replicas, topology=None, number_format=FP8_BLOCK):
    architecture = architecture_of(family)
    traces = [worker_trace(architecture, worker, workers, number_format) for worker in range(workers)]
    topology = topology or Topology.apart(source.world_size, workers * replicas)
    quantisation = Quantisation(number_format, torch.bfloat16)
    return TransferSpec(architecture, source, "local", traces, replicas, topology, BUCKET_BYTES, quantisation)


SPECS = {
    "one rank to one worker": ("qwen3", ONE, 1, 1),
    "two ranks to two workers": ("qwen3", TENSOR, 2, 1),
    "experts to two engines": ("qwen3_moe", EXPERT, 1, 2),
    "two engines whose workers relay": ("qwen3_moe", TENSOR, 2, 2, Topology.separate(2, 4, gpus_per_node=4)),
    "rows to two workers": ("qwen3", TENSOR, 2, 1, None, INT8_CHANNEL),
    "parts of rows to two workers": ("qwen3_moe", TENSOR, 2, 1, None, MXFP8),
}


def empty(trace):
    return {name: torch.zeros(shape, dtype=trace.dtypes[name]) for name, shape in trace.shard.local_shapes.items()}
