"""Seconds of the rollout: every decoding step of an engine, from a full batch to the last long response."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from converters.architectures import Architecture
from converters.cost.compute import decoding_widths, head_widths
from converters.layouts.parallel_sizes import ParallelSizes
from converters.number_formats import NumberFormat
from megarl.planning.lengths import longer_than
from megarl.planning.memory.engine import EngineMemory, element_bytes, engine_weights
from megarl.planning.memory.rank_weights import RankWeights
from megarl.planning.step.speeds import ENGINE_STEP_S, LAUNCHED_LAYER_S, RECORDED_LAYER_S, Speeds
from megarl.planning.workload import Workload

_BF16 = 2
_STEPS = 32
"""Number of points along the responses at which the time of a decoding step is computed."""
_MEANS = 20
"""Among a billion responses, two are longer than as many means."""


@dataclass(frozen=True)
class Decoding:
    """A decoding engine."""

    architecture: Architecture
    parallel: ParallelSizes
    number_format: NumberFormat | None
    memory: EngineMemory
    speeds: Speeds
    is_eager: bool = False
    """Kernels are launched one by one: vLLM's `enforce_eager`."""
    most_samples: float = math.inf
    """Samples that the engine computes at once."""

    @cached_property
    def _weights(self) -> RankWeights:
        return engine_weights(self.architecture, self.parallel)

    def step_seconds(self, sequences: float, context: float) -> float:
        """Seconds to sample one token for each of `sequences`, which have `context` tokens on average."""
        weights = self._weights
        own = sequences / self.memory.attention_ranks
        share = _expert_share(self.architecture)
        touched = 1 - (1 - share) ** sequences
        size = element_bytes(self.number_format)
        read = weights.logits * _BF16 + (weights.dense + weights.experts * touched) * size
        flops = 2 * (own * weights.multiplied + sequences * share * weights.experts)
        computing = self.speeds.products(flops, read, is_fp8=self.number_format is not None)
        pairs = own * context
        computing += self.speeds.products(pairs * self._pair_flops(decoding_widths), pairs * self.memory.kv_token)
        layer = LAUNCHED_LAYER_S if self.is_eager else RECORDED_LAYER_S
        layers = self.architecture.num_layers
        return computing + layers * (layer + self._talking(own)) + ENGINE_STEP_S

    def prefill_seconds(self, tokens: float, length: float) -> float:
        """Seconds to prefill `tokens` prompt tokens on the engine, in prompts of this length."""
        weights = self._weights
        own = tokens / self.memory.attention_ranks
        flops = 2 * (own * weights.multiplied + tokens * _expert_share(self.architecture) * weights.experts)
        computing = self.speeds.products(flops, 0, is_fp8=self.number_format is not None)
        # Causal: half of the pairs.
        computing += self.speeds.products(own * length / 2 * self._pair_flops(head_widths), 0)
        return computing + self.architecture.num_layers * self._talking(own)

    def _pair_flops(self, widths: Callable[[Architecture], tuple[int, int]]) -> float:
        """Attention FLOPs per pair of tokens, with heads as wide as `widths` says."""
        heads = self.architecture.transformer_config["num_attention_heads"] / self.parallel.tensor_model_parallel_size
        return 2 * heads * sum(widths(self.architecture)) * self.architecture.num_layers

    def _talking(self, own: float) -> float:
        """Seconds of a layer's collectives: all-reduces after attention and MLP, or the all-to-all of whole experts."""
        hidden = _BF16 * self.architecture.transformer_config["hidden_size"]
        tensor = self.parallel.tensor_model_parallel_size
        if self.memory.attention_ranks == 1:
            return 2 * self.speeds.all_reduce(own * hidden, tensor)
        sent = own * hidden * self.architecture.transformer_config["moe_router_topk"] / tensor
        experts = self.speeds.all_to_all(sent, self.parallel.expert_model_parallel_size)
        return self.speeds.all_reduce(own * hidden, tensor) + 2 * experts


def _expert_share(architecture: Architecture) -> float:
    """Share of the experts that a token is routed to."""
    if not architecture.num_experts:
        return 0.0
    return architecture.transformer_config["moe_router_topk"] / architecture.num_experts


def rollout_seconds(engine: Decoding, workload: Workload, replicas: int) -> float:
    """Seconds until an engine has finished the last of its share of the responses.

    The engine decodes as many sequences at once as its KV cache and `most_samples` allow. Responses have the lengths of
    `megarl.planning.lengths`: as they finish, the batch shrinks, and at the end the longest ones decode alone.
    """
    sequences = math.ceil(workload.responses / replicas)
    prompts = math.ceil(workload.prompts / replicas)
    room = engine.memory.tokens / (workload.prompt_tokens + workload.response_tokens)
    together = max(1.0, min(sequences, room, engine.most_samples))
    # Waiting requests start as others finish, so the batch is full until all have started.
    steps = (sequences - together) * workload.response_tokens / together
    full = steps * engine.step_seconds(together, workload.decoding_context)
    prefill = engine.prefill_seconds(prompts * workload.prompt_tokens, workload.prompt_tokens)
    return full + prefill + _ending(engine, workload, together)


def _ending(engine: Decoding, workload: Workload, sequences: float) -> float:
    """Seconds from the start of `sequences` to the end of the last one."""
    seconds = 0.0
    for begin, end, alive in _alive(workload, sequences):
        context = workload.prompt_tokens + (begin + end) / 2
        seconds += (end - begin) * engine.step_seconds(max(1.0, alive * sequences), context)
    return seconds


def _alive(workload: Workload, sequences: float) -> Iterator[tuple[float, float, float]]:
    """Intervals of the responses: first and last token, and the share of responses that are still running."""
    longest, rate = float(workload.max_response_tokens), workload.length_rate
    # If the mean is far below the longest, hardly any response comes near that.
    step = min(1.0, _MEANS / rate if rate > 0 else 1.0) / _STEPS
    for number in range(_STEPS):
        alive = longer_than((number + 0.5) * step, rate)
        # Less than half a response counts as none.
        if alive * sequences >= 0.5:
            yield longest * number * step, longest * (number + 1) * step, alive
