"""Seconds of Megatron's passes over a batch: the slowest stage, its micro-batches, and the pipeline bubble."""

from dataclasses import dataclass, replace
from functools import cached_property

from converters.architectures import Architecture
from converters.cost.compute import head_widths
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.memory.activations import has_experts
from megarl.planning.memory.rank_weights import RankWeights, rank_weights, stage_layers
from megarl.planning.memory.trainer import TrainingOptions
from megarl.planning.step.speeds import LAUNCHED_LAYER_S, Speeds
from megarl.planning.workload import Workload

_BF16, _FLOAT32 = 2, 4
_BACKWARD = 2
"""Matrix products in the backward pass per product in the forward pass."""


@dataclass(frozen=True)
class PassSeconds:
    """Forward seconds of one micro-batch on a pipeline stage."""

    computing: float
    tensor: float
    """Tensor-parallel collectives."""
    experts: float
    """The all-to-all of tokens."""
    context: float
    """The exchange of keys and values in context parallelism."""
    sending: float
    """Sending to the next stage, after each chunk."""

    @property
    def talking(self) -> float:
        """All communication."""
        return self.tensor + self.experts + self.context + self.sending

    @property
    def total(self) -> float:
        """The sum, as if nothing overlapped."""
        return self.computing + self.talking

    def after(self, products: int, *, again: bool) -> float:
        """Seconds of the backward pass, with `products` per forward product; `again` if it recomputes the forward pass.

        Gradients repeat all communication of the forward pass, once. For weight gradients, tensor parallelism also
        gathers again the inputs of half of the products. Under context parallelism keys and values go round once more,
        beside their gradients.
        """
        backward = products * self.computing + self.talking + self.tensor / 2 + self.context
        # A recomputed layer has its input already.
        return backward + (self.total - self.sending if again else 0.0)


@dataclass(frozen=True)
class Training:
    """A trainer's passes."""

    architecture: Architecture
    parallel: ParallelSizes
    options: TrainingOptions
    speeds: Speeds
    workload: Workload

    @property
    def log_prob_seconds(self) -> float:
        """Seconds of all forward passes over the batch before the update."""
        workload = self.workload
        # A rank has all of its sequences of the step at once.
        number = workload.micro_batches(self.parallel.data_parallel_size) * workload.updates
        # Multi-token-prediction layers run only in updates.
        policy = replace(self, architecture=self.architecture.without_mtp)
        slowest = max(max(each.total, policy._gathering) for each in policy._stages)
        return workload.log_prob_passes * self._pipelined(slowest, number)

    @property
    def update_seconds(self) -> float:
        """Seconds of all optimizer steps."""
        # Frozen weights need no gradient, which is half of the backward pass.
        backward = 1 if self.options.lora else _BACKWARD
        slowest = 0.0
        for stage, each in enumerate(self._stages):
            # Gradient accumulation reads and writes all gradients; an adapter has few.
            weights = 0 if self.options.lora else self._held[stage].total
            adding = self.speeds.memory(weights * 2 * self.options.gradient_bytes)
            # Weights are gathered again, and gradients are reduce-scattered.
            after = max(each.after(backward, again=self.options.recompute.is_full), 2 * self._gathering)
            slowest = max(slowest, max(each.total, self._gathering) + after + adding)
        number = self.workload.micro_batches(self.parallel.data_parallel_size)
        return self.workload.updates * (self._pipelined(slowest, number) + self._optimizer_seconds())

    def _pipelined(self, seconds: float, number: int) -> float:
        """Seconds of `number` micro-batches that take `seconds` each per stage, with the bubble at start and end."""
        waiting = (self.parallel.pipeline_model_parallel_size - 1) / self.parallel.chunks
        return seconds * (number + waiting)

    @cached_property
    def _weights(self) -> list[RankWeights]:
        """Elements per stage with which its ranks compute."""
        stages = range(self.parallel.pipeline_model_parallel_size)
        return [rank_weights(self.architecture, self.parallel.unsharded, stage) for stage in stages]

    @cached_property
    def _held(self) -> list[RankWeights]:
        """Elements per stage that its ranks hold between passes."""
        if not self.parallel.use_torch_fsdp2:
            return self._weights
        return [rank_weights(self.architecture, self.parallel, 0)]

    @cached_property
    def _gathering(self) -> float:
        """Seconds of FSDP2's all-gathers during a pass, one per layer, plus one each for embedding and output layer."""
        if not self.parallel.use_torch_fsdp2:
            return 0.0
        gathers = self.architecture.num_layers + 2
        nbytes = self._weights[0].total * self.options.weight_bytes / gathers
        copies, stride = self.parallel.weight_copies, self.parallel.tensor_model_parallel_size
        return gathers * self.speeds.gather(nbytes, copies, stride)

    @cached_property
    def _stages(self) -> list[PassSeconds]:
        return [self._stage(stage) for stage in range(self.parallel.pipeline_model_parallel_size)]

    def _stage(self, stage: int) -> PassSeconds:
        parallel, config = self.parallel, self.architecture.transformer_config
        tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        tokens = self.workload.micro_batch_tokens(parallel.data_parallel_size) / context
        layers = stage_layers(self.architecture, parallel, stage)
        if stage == parallel.pipeline_model_parallel_size - 1:
            layers += [self.architecture.num_layers - 1] * self.architecture.mtp_layers
        moe = sum(has_experts(self.architecture, layer) for layer in layers)
        hidden = tokens * config["hidden_size"] * _BF16
        # The tokens of a sequence-parallel rank are sent to each of their experts and back.
        sent = hidden / tensor * config.get("moe_router_topk", 0) * self.options.expert_load
        key_values = tokens * _key_value_width(self.architecture) / tensor * _BF16
        # Attention, dense MLPs and shared experts gather their tokens and scatter their sums; routed experts get theirs
        # by the all-to-all.
        gathers = 4 * len(layers) - (0 if config.get("moe_shared_expert_intermediate_size") else 2 * moe)
        return PassSeconds(
            computing=self._computing(stage, tokens, layers, moe),
            tensor=gathers * self.speeds.gather(hidden, tensor),
            experts=moe * 2 * self.speeds.all_to_all(sent, parallel.expert_ranks),
            context=len(layers) * self.speeds.gather(key_values * context, context, tensor),
            sending=parallel.chunks * self.speeds.send(hidden / tensor)
            if parallel.pipeline_model_parallel_size > 1
            else 0.0,
        )

    def _computing(self, stage: int, tokens: float, layers: list[int], moe: int) -> float:
        parallel = self.parallel
        weights = self._weights[stage]
        # Multi-token-prediction layers compute logits, too.
        products = weights.multiplied + weights.logits * self.architecture.mtp_layers
        dense = self.speeds.products(2 * tokens * products, products * _BF16)
        length = self.workload.attention_length
        heads = self.architecture.transformer_config["num_attention_heads"] / parallel.tensor_model_parallel_size
        # Causal attention has half of the pairs, in two products.
        pairs = tokens * length * heads * sum(head_widths(self.architecture))
        attention = self.speeds.products(len(layers) * pairs, 0)
        experts = 0.0
        if moe:
            routed = tokens * parallel.expert_ranks / parallel.tensor_model_parallel_size * self.options.expert_load
            share = self.architecture.transformer_config["moe_router_topk"] / self.architecture.num_experts
            experts = self.speeds.products(2 * routed * share * weights.experts, weights.experts * _BF16)
        return max(dense + attention + experts, len(layers) * LAUNCHED_LAYER_S)

    def _optimizer_seconds(self) -> float:
        """Seconds of reducing gradients over data-parallel ranks, Adam, and gathering weights; few for an adapter."""
        if self.options.lora:
            return 0.0
        if self.parallel.use_torch_fsdp2:
            return self._adam_seconds(self._held[0].total)
        parallel, slowest = self.parallel, 0.0
        copies, expert_copies = parallel.weight_copies, parallel.expert_copies
        for stage in range(parallel.pipeline_model_parallel_size):
            weights = self._weights[stage]
            moved = self.options.gradient_bytes + self.options.weight_bytes
            seconds = self.speeds.gather(weights.shared * moved, copies, parallel.tensor_model_parallel_size)
            seconds += self.speeds.gather(weights.experts * moved, expert_copies, parallel.expert_ranks)
            own = weights.shared / copies + weights.experts / expert_copies
            slowest = max(slowest, seconds + self._adam_seconds(own))
        return slowest

    def _adam_seconds(self, own: float) -> float:
        """Seconds of Adam for `own` elements."""
        return self.speeds.memory(own * (2 * self.options.optimizer_bytes + _FLOAT32))


def _key_value_width(architecture: Architecture) -> float:
    """Elements of a token's keys and values in one layer."""
    config = architecture.transformer_config
    if architecture.multi_latent_attention:
        return config["num_attention_heads"] * sum(head_widths(architecture))
    return 2 * config["num_query_groups"] * config["kv_channels"]
