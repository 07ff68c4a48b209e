"""Traces where vLLM's own model keeps the weights, in processes that build it without an engine."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from converters.architectures import read_architecture
from converters.layouts.traced_layout import LoadTrace, untraced
from resharding.scenario import DTYPE

_DEADLINE_S = 180.0


class NotRecordableError(RuntimeError):
    """vLLM stores a weight in another form than it is loaded in."""


def trace_vllm_layouts(configs: Sequence[Mapping[str, Any]], workers: int) -> list[list[LoadTrace]]:
    """Trace the layout of each model's tensor-parallel workers.

    Raises NotRecordableError if direct writes are not possible.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(workers, mp_context=context) as pool:
        folders = [Path(name) / str(number) for number in range(len(configs))]
        for folder, config in zip(folders, configs, strict=True):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        calls = [pool.submit(_trace, rank, workers, folders) for rank in range(workers)]
        of_models = [list(of_model) for of_model in zip(*(call.result(_DEADLINE_S) for call in calls), strict=True)]
    for traces in of_models:
        for tensor, reason in untraced(traces).items():
            raise NotRecordableError(f"{tensor}: {reason}")
    return of_models


def _trace(rank: int, workers: int, folders: Sequence[Path]) -> list[LoadTrace]:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    # With different names, workers do not create the shared memory for all-reduces, which they do not need.
    os.environ["VLLM_DIST_IDENT"] = f"worker_{rank}"
    from megarl.rollout.vllm.arguments import prepare_environment

    prepare_environment()
    # vLLM's CPU worker would make GPU calls harmless, but here there is none.
    torch.accelerator.empty_cache = lambda *_: None
    import megarl.rollout.vllm.worker  # noqa: F401

    return [_record_model(rank, workers, folder) for folder in folders]


def _record_model(rank: int, workers: int, folder: Path) -> LoadTrace:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model

    from megarl.rollout.vllm.arguments import make_engine_config
    from megarl.rollout.vllm.tracing import trace_model

    given = {"load_format": "dummy", "max_model_len": 128, "tensor_parallel_size": workers}
    engine_config = make_engine_config(folder, given)
    architecture = read_architecture(json.loads((folder / "config.json").read_text()))
    with set_current_vllm_config(engine_config):
        parallel_state.init_distributed_environment(workers, rank, f"file://{folder}/store", rank, backend="gloo")
        parallel_state.initialize_model_parallel(workers)
        try:
            model = get_model(vllm_config=engine_config)
            return trace_model(model, engine_config.model_config, architecture.hf_shapes, architecture.hf_dtypes(DTYPE))
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
