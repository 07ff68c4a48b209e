"""Returns routed experts on a CPU, which vLLM 0.32.0 does only in its GPU runner.

A worker records its routers' choices in a step, and assigns the rows to requests by the runner's own order of tokens.
As on a GPU, the rows are returned with the outputs of a step, one per fed token.
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
    """`given` without the argument, which vLLM refuses on a CPU; if it was set, prefix caching is turned off.

    A token found in the prefix cache passes no router. On a GPU vLLM caches its experts, too.

    Raises UserError for data parallelism, for which nothing collects the workers' rows.
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
    """The core of an engine that adds `routed_experts` to the outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.call_workers("record_routed_experts")
        self._rows: dict[str, list[Rows]] = defaultdict(list)

    def step(self) -> list[SampleOutput]:
        """See `Core.step`."""
        outputs = super().step()
        # All workers have the same rows.
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
    """Records the experts of the tokens that a worker's `runner` computes."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._runner = runner
        self._layers: int = runner.model_config.get_total_num_hidden_layers()
        self._of_step: dict[int, torch.Tensor] = {}
        self._rows: dict[str, list[Rows]] = defaultdict(list)
        # The number of tokens of each request that have rows.
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
        """Record a layer's choices [tokens, top-k]; called by vLLM."""
        self._of_step[layer_id] = topk_ids.clone()

    def take(self) -> dict[str, Rows]:
        """Return the rows of each request that were not taken yet."""
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
        # The runner concatenates the tokens of its requests.
        for request in self._runner.input_batch.req_ids:
            start, end = end, end + tokens[request]
            first, known = self._runner.requests[request].num_computed_tokens, self._known[request]
            if first > known:
                raise RuntimeError(f"tokens {known} to {first} of a request passed no router")
            # A request whose KV cache was dropped recomputes tokens; the first rows, with which they were sampled,
            # count.
            if len(new := rows[start + known - first : end]):
                self._rows[request].append(new)
                self._known[request] = first + tokens[request]

    def _rows_of_step(self, tokens: int) -> Rows:
        (topk,) = {each.shape[1] for each in self._of_step.values()}
        rows = np.zeros((tokens, self._layers, topk), dtype=np.int16)
        for layer, choices in self._of_step.items():
            rows[:, layer] = choices[:tokens].numpy()
        return rows
