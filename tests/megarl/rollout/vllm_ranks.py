"""vLLM models without an engine: one process for each tensor-parallel rank, which builds one model after another."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from engine_host import vllm_pool
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.process.ports import free_port
from megarl.quickstart.tiny_models import TINY_MODELS
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment

VOCABULARY = {"llama": 70, "qwen3_moe": 70}
"""vLLM pads a vocabulary to a multiple of 64."""


@dataclass(frozen=True)
class Rank:
    """A rank's model, as a test's function gets it in the rank's process."""

    model: nn.Module
    config: Any
    """vLLM's VllmConfig."""


def write_config(folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    """Write the config.json of a tiny model, and nothing else; returns what is in it."""
    recipe = TINY_MODELS[name]
    config = AutoConfig.for_model(recipe.model_type, dtype="float32", **{**recipe.fields, **fields})
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Ranks:
    """Two processes. A call runs one function in those of the first ranks, at the same time."""

    def __init__(self, processes: list[Pool]) -> None:
        self._processes = processes

    def __call__(
        self, function: Callable[..., Any], folder: Path, engine_args: Mapping[str, Any], *arguments: Any
    ) -> list[Any]:
        """The results of `function(Rank, *arguments)`, with the model in `folder` and dummy weights, rank by rank."""
        port = free_port()
        world = engine_args.get("tensor_parallel_size", 1)
        calls = [
            process.apply_async(_in_rank, (function, rank, world, port, folder, dict(engine_args), arguments))
            for rank, process in enumerate(self._processes[:world])
        ]
        return [call.get(timeout=500) for call in calls]

    def alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in the process of the first rank, which is in no group there."""
        return self._processes[0].apply_async(function, arguments).get(timeout=500)


@contextmanager
def running_ranks() -> Iterator[Ranks]:
    processes = [vllm_pool() for _ in range(2)]
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            # Not waited for: vLLM's process takes seconds to end by itself.
            process.terminate()


def _in_rank(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    folder: Path,
    engine_args: dict[str, Any],
    arguments: tuple[Any, ...],
) -> Any:
    prepare_environment()
    # As the launcher of workers does: a name for the memory that the ranks share.
    os.environ["VLLM_DIST_IDENT"] = f"ranks_{port}"
    # Only the worker makes what belongs to a GPU harmless on a CPU.
    torch.accelerator.empty_cache = lambda *_: None
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model

    import megarl.rollout.vllm.worker  # noqa: F401

    config = make_engine_config(folder, {"load_format": "dummy", "max_model_len": 128, **engine_args})
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        parallel_state.initialize_model_parallel(world)
        try:
            return function(Rank(get_model(vllm_config=config), config), *arguments)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
