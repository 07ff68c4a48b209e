"""Corrections of SGLang 0.5.23 on any device, one function each, installed by its own registry of hooks.

The registry holds names, which SGLang resolves in every process that it starts, before it builds a model.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.process.scratch import note_segment
from megarl.rollout.quantised_load import in_asked_format
from megarl.rollout.sglang.calls import FOLDER_VARIABLE, LOAD_FORMAT
from megatron_ext import device

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATER_OF_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAM = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_ENDS = "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAVER = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal"
_ROUTING_IN_KERNEL = "sglang.srt.layers.moe.topk._can_bypass_trtllm_routing"
_ROUTED = ("sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock", "sglang.srt.models.mixtral.MixtralMoE")
_LIBRARY_PATH = "LD_LIBRARY_PATH"
_NAMES_OF_SEGMENTS = (
    "sglang.srt.distributed.device_communicators.shm_broadcast.make_shm_name",
    "sglang.srt.distributed.parallel_state.make_shm_name",
    "sglang.srt.managers.load_snapshot.shm_path_for",
)


def register() -> None:
    """Register all hooks with SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.update_weights_from_tensor", answer_calls, HookType.AROUND)
    HookRegistry.register(f"{_STREAM}.accept", tell_versions, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}._get_all_weights", quantise_what_is_read, HookType.AROUND)
    HookRegistry.register(_ENDS, end_where_others_do, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLING}.from_schedule_batch", draw_by_seed, HookType.AFTER)
    HookRegistry.register(f"{_SAMPLER}._sample_from_probs", cut_by_top_k_first, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}._build_sampling_mask_output", keep_one_mask_column, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", wait_for_what_runs, HookType.BEFORE)
    release = f"{_UPDATER_OF_SCHEDULER}.release_memory_occupation"
    HookRegistry.register(release, wait_until_all_have_released, HookType.AFTER)
    HookRegistry.register(f"{_SAVER}.configure_subprocess", find_cuda_runtime, HookType.BEFORE)
    HookRegistry.register(_ROUTING_IN_KERNEL, choose_experts_where_they_are_told, HookType.AROUND)
    for block in _ROUTED:
        HookRegistry.register(f"{block}.__init__", keep_logits_in_float32, HookType.AFTER)
    for name in _NAMES_OF_SEGMENTS:
        HookRegistry.register(name, let_segment_go, HookType.AFTER)
    HookRegistry.register("multiprocessing.resource_tracker.register", let_tracked_go, HookType.AROUND)


def answer_calls(original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    """Answer megarl's calls in a worker: they arrive as updates with a `load_format` that SGLang does not know.

    SGLang's own hook, `custom_weight_loader`, is given only the model, but sleeping also needs the KV cache.
    """
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors, load_format)
    from megarl.rollout.sglang import worker

    worker.answer(updater.get_model_runner(), _why_no_others(updater))
    return True, "Success"


def _why_no_others(updater: Any) -> str | None:
    """SGLang's reason why a worker cannot take new weights: something else holds, or has copied, the present ones.

    SGLang 0.5.23 checks this in the call that the hook replaces.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    try:
        updater._assert_weight_cache_inactive("update_weights_from_tensor")
    except RuntimeError as error:
        return str(error)
    return weight_updater._unsupported_derived_weight_cache_error(updater.get_model())


def tell_versions(original: Callable[..., None], stream: Any, *, req: Any) -> None:
    """Report token versions of unfinished samples, too; SGLang 0.5.23 only does so at the end."""
    told = len(stream.weight_versions)
    original(stream, req=req)
    if len(stream.weight_versions) > told and stream.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        stream.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=stream.current_weight_version,
            num_output_tokens=req.send_token_offset,
        )


def let_segment_go(name: str, *_: Any, **__: Any) -> None:
    """Note a shared-memory segment, to be removed with the server's folder.

    SGLang 0.5.23 always leaves its load metrics behind, and its broadcast queues if it is killed.
    """
    note_segment(Path(os.environ[FOLDER_VARIABLE]), Path(name).name)


def let_tracked_go(original: Callable[[str, str], None], name: str, kind: str) -> None:
    """Note semaphores and segments that multiprocessing tracks: SGLang 0.5.23 kills the tracker with its workers."""
    original(name, kind)
    let_segment_go(f"{_PREFIXES.get(kind, '')}{name.removeprefix('/')}")


_PREFIXES = {"semaphore": "sem."}
"""Kind -> prefix of its file name in /dev/shm."""


def quantise_what_is_read(
    original: Callable[..., Any], loader: Any, model_config: Any, model: Any
) -> Iterator[tuple[str, Tensor]]:
    """Let an engine that holds a number format load a checkpoint that is not quantised.

    SGLang 0.5.23 quantises on loading only to other formats and by its own rules, and expects a checkpoint for block
    formats to have codes already.
    """
    weights = original(loader, model_config, model)
    return in_asked_format(weights, model_config.model_path, model_config.hf_config, model_config.dtype)


def end_where_others_do(original: Callable[..., set[int]], config: Any) -> set[int]:
    """End responses at the tokens of generation_config.json if there is one, as other engines do.

    SGLang 0.5.23 also ends them at those of config.json.
    """
    if config.hf_generation_config is None:
        return original(config)
    ends = config.hf_generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def draw_by_seed(info: Any, _class: type, batch: Any, *_: Any, **__: Any) -> None:
    """Draw a seeded sample by its seed and token position, independent of the rest of the batch.

    SGLang 0.5.23 honours seeds only with `enable_deterministic_inference`, which makes all kernels slower.
    """
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if all(seed is not None for seed in seeds):
        # An asynchronous copy, like SGLang's other copies of a batch.
        info.sampling_seed = device.sent(torch.tensor(seeds, dtype=torch.int64), info.temperatures.device)


def cut_by_top_k_first(original: Callable[..., Any], sampler: Any, probs: Tensor, info: Any, *rest: Any) -> Any:
    """Apply `top_p` to what `top_k` keeps, as other engines do; SGLang 0.5.23 applies it to all tokens."""
    if info.need_top_k_sampling and info.need_top_p_sampling:
        all_tokens = probs.shape[-1]
        # None if a sample of the batch has no `top_k`; the others' values are only on the GPU.
        most = min(info.max_top_k or all_tokens, all_tokens)
        last = info.top_ks.clamp(max=all_tokens).long().view(-1, 1) - 1
        least = probs.topk(most, -1).values.gather(-1, last)
        kept = probs.masked_fill(probs < least, 0)
        probs = kept / kept.sum(-1, keepdim=True)
    return original(sampler, probs, info, *rest)


def keep_one_mask_column(mask: Any, *_: Any, **__: Any) -> None:
    """Keep one column of the mask of tokens that `top_p` and `top_k` keep: nobody asks for it.

    SGLang 0.5.23 copies `sampling_mask_max_tokens` columns, the whole vocabulary, to the host for each sample in every
    step. The log-probs of sampled tokens are computed before that.
    """
    mask.token_ids = mask.token_ids[:, :1].contiguous()
    mask.lengths = mask.lengths.clamp(max=1)


def wait_for_what_runs(_updater: Any) -> None:
    """Let the GPU finish the running batch before a session for weights begins.

    At that point SGLang 0.5.23 reorders experts to checkpoint order (on Blackwell, in bf16), in the memory that the
    batch reads; a pause that keeps requests in place does not wait for the batch.
    """
    device.synchronize()


def wait_until_all_have_released(_answer: Any, updater: Any, *_: Any) -> None:
    """Report released memory only when all workers have released it.

    In SGLang 0.5.23 the first worker answers, and the workers synchronise before they release weights, not after: a
    trainer would allocate on a GPU that still holds them.
    """
    torch.distributed.barrier(group=updater.tp_cpu_group)


def find_cuda_runtime(_saver: Any) -> None:
    """Let processes find the CUDA runtime among torch's companion packages, after all configured paths.

    SGLang 0.5.23 preloads torch_memory_saver 0.0.9.post1 in its workers, which needs the runtime before torch is
    imported and could locate it. If the dynamic loader finds none, not even Python starts.
    """
    major = device.cuda_version().partition(".")[0]
    found = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/libcudart.so.{major}")) if major else []
    places = os.environ.get(_LIBRARY_PATH, "").split(os.pathsep)
    if found and (folder := str(found[0].parent)) not in places:
        os.environ[_LIBRARY_PATH] = os.pathsep.join([*filter(None, places), folder])


def choose_experts_where_they_are_told(original: Callable[[Any], bool], config: Any) -> bool:
    """Choose experts outside the MoE kernel if requests ask for them.

    On Blackwell SGLang 0.5.23 leaves the choice to FlashInfer's kernels, which do not report it: every token would show
    expert 0.
    """
    from sglang.srt.runtime_context import get_exec

    return not get_exec().features.enable_return_routed_experts and original(config)


def keep_logits_in_float32(_made: None, block: Any, *_: Any, **__: Any) -> None:
    """Make routers return float32 logits, as those of DeepSeek and GLM do in SGLang 0.5.23.

    It rounds those of Qwen3-MoE and Mixtral to the model's dtype, so near ties go to other experts than in the trainer.
    """
    gate = block.gate
    gate.forward = lambda hidden: (_float32_product(hidden, gate.weight), None)


def _float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden.float(), weight.float())
