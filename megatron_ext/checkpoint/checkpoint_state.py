"""State of a rank as megatron-core saves and loads it: model, reference, random numbers."""

import argparse
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from converters.formats.torch_dist.common_state import CHECKPOINT_VERSION
from converters.formats.torch_dist.megatron_lm import Vocabulary, megatron_lm_arguments
from converters.layouts.chunk_names import chunk_names, chunk_prefixes
from converters.layouts.megatron import ParallelSizes
from megatron_ext import device
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.optimizer.fully_sharded import first_element, is_cut, outlined, own_rows
from megatron_ext.optimizer.optimizer_shards import shards
from megatron_ext.reference import ReferenceWeights

REFERENCE = "reference."
"""Prefix of the keys of a reference model's weights."""
_RNG = "rng_state"


def named_chunks(model: MegatronModel) -> dict[str, GPTModel]:
    """The chunks of a model by the names that megatron-core's state dicts have for them."""
    bare = [chunk.module for chunk in model.chunks]
    return dict(zip(chunk_names(len(bare)), bare, strict=True))


def sharded_model(model: MegatronModel) -> dict[str, Any]:
    """Weights, rows of them, or adapters that this rank trains, chunk by chunk, as parts of the whole model's."""
    chunks, states = named_chunks(model), _whole_parts(model)
    return {
        name: {key: part for of_part in _with_own_rows(chunks[name], parts) for key, part in of_part.items()}
        for name, parts in states.items()
    }


def weight_parts(model: MegatronModel, weights: Mapping[str, Any]) -> dict[int, ShardedBase]:
    """`id` of each parameter that this rank trains -> its whole checkpoint entry; `weights` is the `sharded_model`."""
    if not model.options.parallel.use_torch_fsdp2:
        return {id(each.data): each for each in nested_values(weights) if isinstance(each, ShardedBase)}
    chunks, states = named_chunks(model), _whole_parts(model)
    return {id(each): states[name][key] for name, chunk in chunks.items() for key, each in chunk.named_parameters()}


def sharded_reference(model: MegatronModel, reference: ReferenceWeights) -> dict[str, Any]:
    """The parts of the model's state with the tensors of the reference, under keys of their own."""
    chunks, states = named_chunks(model), _whole_parts(model)
    state: dict[str, Any] = {}
    for prefix, (name, parts) in zip(chunk_prefixes(len(states)), states.items(), strict=True):
        parameters = dict(chunks[name].named_parameters())
        # Other entries are not weights.
        own = {key: reference.tensors[prefix + key] for key in parts if prefix + key in reference.tensors}
        state[REFERENCE + name] = {
            each: part
            for key, tensor in own.items()
            for each, part in _own_parts(key, parts[key], tensor, parameters.get(key), REFERENCE).items()
        }
    return state


def loaded_reference(
    model: MegatronModel, reference: ReferenceWeights, state: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    """The reference's tensors, by the names that `ReferenceWeights` has for them."""
    if model.options.parallel.use_torch_fsdp2:
        return reference.tensors  # into which the rows were read
    chunks = named_chunks(model)
    return {
        prefix + key: tensor
        for prefix, name in zip(chunk_prefixes(len(chunks)), chunks, strict=True)
        for key, tensor in state[REFERENCE + name].items()
    }


def _whole_parts(model: MegatronModel) -> dict[str, Any]:
    """Weights or adapters as if FSDP2 had not sharded them; sharded ones have no values."""
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks = named_chunks(model)
    states = {}
    for name, chunk in chunks.items():
        with outlined(chunk):
            states[name] = chunk.sharded_state_dict(metadata=metadata)
    if model.adapters is None:
        return states
    trained = model.adapters.tensors
    return {
        name: {key: part for key, part in state.items() if prefix + key in trained}
        for prefix, (name, state) in zip(chunk_prefixes(len(states)), states.items(), strict=True)
    }


def _with_own_rows(chunk: GPTModel, parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The `parts` of a chunk, with this rank's rows in place of parameters sharded by FSDP2."""
    cut = {key: each for key, each in chunk.named_parameters() if is_cut(each)}
    for key, part in parts.items():
        yield _own_parts(key, part, own_rows(cut[key]), cut[key]) if key in cut else {key: part}


def _own_parts(
    key: str, part: ShardedBase, tensor: Tensor, parameter: Tensor | None, prefix: str = ""
) -> dict[str, ShardedBase]:
    """Checkpoint entries for `tensor`, this rank's slice of `parameter`; `part` describes the whole.

    Keys in the checkpoint begin with `prefix`.
    """
    if parameter is None or not is_cut(parameter):
        return {key: replace(part, key=prefix + part.key, data=tensor)}
    own = shards(part, first_element(parameter), tensor.view(-1), prefix=prefix, is_own=True)
    return {f"{key}.{number}": each for number, each in enumerate(own)}


def megatron_lm_state(model: MegatronModel) -> dict[str, Any]:
    """The count of steps and the arguments, for Megatron-LM's `load_checkpoint`.

    They name no tokenizer, which is not part of a run's checkpoint.
    """
    sizes, vocabulary = model.options.parallel, model.architecture.gpt_model["vocab_size"]
    arguments = megatron_lm_arguments(
        model.architecture,
        sizes,
        Vocabulary(sizes.padded_vocabulary(vocabulary), multiple=1, tokenizer=Path()),
        model.options.params_dtype,
    )
    del arguments["tokenizer_model"]
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": model.scheduler.num_steps,
    }


def layout(sizes: ParallelSizes) -> dict[str, Any]:
    """The parallel sizes on which random numbers depend, as stored in a checkpoint."""
    return {name: size for name, size in asdict(sizes).items() if name != "use_torch_fsdp2"}


def sharded_rng_state() -> ShardedObject:
    """The state of the random number generators of this rank, one of all ranks'."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if (of_gpu := device.gpu_rng_state()) is not None:
        state["cuda"] = of_gpu
    return ShardedObject(_RNG, state, (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),))


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the generators from a `sharded_rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    # A checkpoint from a CPU has no state of a GPU.
    if "cuda" in state:
        device.set_gpu_rng_state(state["cuda"])
