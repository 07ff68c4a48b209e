"""Routed experts on a CPU, where vLLM 0.32.0 returns none: that part of it belongs to its runner for GPUs.

A worker takes down what its routers choose in a step, and gives each request's tokens their rows by the runner's own
order of them. The rows go the way that those of a GPU go: with the outputs of a step, one for each token that was fed.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from converters.errors import UserError
from megarl.rollout.vllm.core import InProcessCore, SampleOutput

ARGUMENT = "enable_return_routed_experts"
Rows = npt.NDArray[np.int16]
"""[tokens, layers, top-k]: 0 in layers without experts."""


def without_argument(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the argument, which vLLM refuses on a CPU, and with every token computed where it was set.

    A token whose keys and values are found in a cache has passed no router. On a GPU vLLM keeps its experts with them.

    Raises UserError for data-parallel ranks, whose workers are asked by none.
    """
    others = {name: value for name, value in given.items() if name != ARGUMENT}
    if not given.get(ARGUMENT):
        return others
    if (given.get("data_parallel_size") or 1) > 1:
        raise UserError(
            f"rollout.engine_args.data_parallel_size={given['data_parallel_size']} with {ARGUMENT} needs GPUs: on a CPU"
            " take rollout.replicas engines instead"
        )
    return {**others, "enable_prefix_caching": False}


class RecordingCore(InProcessCore):
    """The core of an engine whose outputs have `routed_experts`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.call_workers("record_routed_experts")
        self._rows: dict[str, list[Rows]] = defaultdict(list)

    def step(self) -> list[SampleOutput]:
        """See `Core.step`."""
        outputs = super().step()
        # All workers have the same.
        for request, rows in self.call_workers("take_routed_experts")[0].items():
            self._rows[request].append(rows)
        for output in outputs:
            if rows_of_request := self._rows.pop(output.request_id, None):
                output.routed_experts = np.concatenate(rows_of_request)
        return outputs

    def abort(self, ids: Sequence[str]) -> None:
        """See `Core.abort`."""
        super().abort(ids)
        for request in ids:
            self._rows.pop(request, None)


class Recorder:
    """Takes down the experts of the tokens that a worker's `runner` computes."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._runner = runner
        self._layers: int = runner.model_config.get_total_num_hidden_layers()
        self._of_step: dict[int, torch.Tensor] = {}
        self._rows: dict[str, list[Rows]] = defaultdict(list)
        # How many of its tokens each request has rows of.
        self._known: dict[str, int] = defaultdict(int)
        bind_routed_experts_capturer(runner.model, self)
        execute = runner.execute_model

        @functools.wraps(execute)
        def execute_and_record(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._of_step = {}
            result = execute(scheduled, *arguments, **options)
            self._record(scheduled)
            return result

        runner.execute_model = execute_and_record

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Take down a layer's choices [tokens, top-k]; vLLM calls it."""
        self._of_step[layer_id] = topk_ids.clone()

    def take(self) -> dict[str, Rows]:
        """The rows of each request that were not taken yet."""
        rows, self._rows = self._rows, defaultdict(list)
        return {request: np.concatenate(parts) for request, parts in rows.items()}

    def _record(self, scheduled: Any) -> None:
        for request in scheduled.finished_req_ids:
            self._known.pop(request, None)
            self._rows.pop(request, None)
        tokens: Mapping[str, int] = scheduled.num_scheduled_tokens
        if not tokens:
            return
        rows = self._rows_of_step(sum(tokens.values()))
        end = 0
        # The runner lays the tokens of its requests out one request after the other.
        for request in self._runner.input_batch.req_ids:
            start, end = end, end + tokens[request]
            first, known = self._runner.requests[request].num_computed_tokens, self._known[request]
            if first > known:
                raise RuntimeError(f"tokens {known} to {first} of a request passed no router")
            # A request whose keys and values were dropped computes tokens again, which were sampled by the first rows.
            if len(new := rows[start + known - first : end]):
                self._rows[request].append(new)
                self._known[request] = first + tokens[request]

    def _rows_of_step(self, tokens: int) -> Rows:
        (topk,) = {each.shape[1] for each in self._of_step.values()}
        rows = np.zeros((tokens, self._layers, topk), dtype=np.int16)
        for layer, choices in self._of_step.items():
            rows[:, layer] = choices[:tokens].numpy()
        return rows
