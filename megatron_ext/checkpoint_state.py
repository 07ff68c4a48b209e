"""State of a rank as megatron-core saves and loads it: model, reference, random numbers."""

import argparse
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from converters.formats.torch_dist.common_state import CHECKPOINT_VERSION
from converters.formats.torch_dist.megatron_lm import Vocabulary, megatron_lm_arguments
from converters.layouts.megatron import ParallelSizes
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.reference import ReferenceWeights

REFERENCE = "reference."
"""Begins the keys of a reference model's weights."""
_RNG = "rng_state"


def named_chunks(engine: MegatronModel) -> dict[str, GPTModel]:
    """The chunks of a model by the names that megatron-core's state dicts have for them."""
    bare = [chunk.module for chunk in engine.chunks]
    return {"model": bare[0]} if len(bare) == 1 else {f"model{i}": chunk for i, chunk in enumerate(bare)}


def sharded_model(engine: MegatronModel) -> dict[str, Any]:
    """The weights that this rank trains, chunk by chunk, as parts of the whole model's: all of them, or adapters."""
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks = named_chunks(engine)
    states = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in chunks.items()}
    if engine.adapters is None:
        return states
    trained = engine.adapters.tensors
    return {
        name: {key: part for key, part in state.items() if (f"{name}.{key}" if len(chunks) > 1 else key) in trained}
        for name, state in states.items()
    }


def sharded_reference(engine: MegatronModel, reference: ReferenceWeights) -> dict[str, Any]:
    """The parts of the model's state with the tensors of the reference, under keys of their own."""
    model = sharded_model(engine)
    state: dict[str, Any] = {}
    for name, parts in model.items():
        prefix = f"{name}." if len(model) > 1 else ""
        state[REFERENCE + name] = {
            key: replace(part, key=REFERENCE + part.key, data=reference.tensors[prefix + key])
            for key, part in parts.items()
            # The rest is no weights.
            if prefix + key in reference.tensors
        }
    return state


def loaded_reference(engine: MegatronModel, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The reference's tensors, by the names that `ReferenceWeights` has for them."""
    chunks = named_chunks(engine)
    return {
        f"{name}.{key}" if len(chunks) > 1 else key: tensor
        for name in chunks
        for key, tensor in state[REFERENCE + name].items()
    }


def megatron_lm_state(engine: MegatronModel) -> dict[str, Any]:
    """The count of steps and the arguments, for Megatron-LM's `load_checkpoint`.

    They say nothing of a tokenizer, which is no part of a checkpoint of a run.
    """
    sizes, vocabulary = engine.options.parallel, engine.architecture.gpt_model["vocab_size"]
    arguments = megatron_lm_arguments(
        engine.architecture,
        sizes,
        Vocabulary(sizes.padded_vocabulary(vocabulary), multiple=1, tokenizer=Path()),
        engine.options.params_dtype,
    )
    del arguments["tokenizer_model"]
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": engine.scheduler.num_steps,
    }


def layout(sizes: ParallelSizes) -> dict[str, Any]:
    """The parallel sizes, as a checkpoint says at which it was written."""
    return asdict(sizes)


def sharded_rng_state() -> ShardedObject:
    """The state of the random number generators of this rank, one of all ranks'."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(_RNG, state, (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),))


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Let the generators go on from what `sharded_rng_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
