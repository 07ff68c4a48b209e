"""Program: print what the installed SGLang has and does itself, as JSON.

It runs in the environment that has SGLang: `python sglang_itself.py FOLDER ...`, folders of models.
"""

import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed as dist

from megarl.resharding.direct.weight_receiver import WeightReceiver
from megarl.rollout.protocol import UpdateError
from megarl.rollout.sglang import cpu, hooks, tracing
from megarl.rollout.sglang.arguments import server_arguments
from megarl.rollout.sglang.calls import FOLDER_VARIABLE, LOAD_FORMAT, CallFolder
from megarl.rollout.sglang.kind import SGLANG
from megatron_ext import device

cpu.corrections.install()

from sglang.kernels.ops.gemm import bf16_fp32  # noqa: E402 (what it needs is above)
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups import memory_hook, pipeline  # noqa: E402
from sglang.srt.arg_groups.arg_utils import record_fields  # noqa: E402
from sglang.srt.arg_groups.model_override_base import resolving_view  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.environ import EnvField, Envs  # noqa: E402
from sglang.srt.layers.moe import topk  # noqa: E402
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend, RoutingMethodType  # noqa: E402
from sglang.srt.layers.quantization import fp8  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager  # noqa: E402
from sglang.srt.model_executor.model_runner_components import weight_updater  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

WRITES = {
    "begin_loading": ("begin_loading",),
    "load_bucket": ("load_bucket", None),
    "open": ("call_receiver", WeightReceiver.open, None, 0),
    "receive": ("call_receiver", WeightReceiver.receive, 1),
}
READS = {
    "stop_profiler": ("stop_profiler", 10**6, 0.0),
    "close": ("call_receiver", WeightReceiver.close),
    "disconnect": ("call_receiver", WeightReceiver.disconnect),
    "connect": ("call_receiver", WeightReceiver.connect, None),
}


def updates(folder):
    """Reason for which SGLang takes no new weights -> call -> how a worker of SGLang's own class answers it."""
    answers = {}
    for reason in ("none", "a copy of the model's own", "a product from halves", "weights of a daemon"):
        with ExitStack() as stack:
            updater = updater_of(torch.nn.Linear(2, 2))
            mode = "daemon" if reason == "weights of a daemon" else "off"
            told = SimpleNamespace(weight_cache_mode=mode)
            stack.enter_context(mock.patch.object(weight_updater, "get_model", lambda told=told: told))
            if reason == "a copy of the model's own":
                updater.get_model()._derived_weight_cache_error = "Online weight updates are not supported: a copy"
            if reason == "a product from halves":
                stack.enter_context(mock.patch.object(bf16_fp32, "_hpc_gemm_enabled", True))
            answers[reason] = {name: asked(folder, updater, *call) for name, call in {**WRITES, **READS}.items()}
    return answers


def updater_of(model):
    model.config = SimpleNamespace()
    runner = SimpleNamespace(model=model)
    runner.weight_updater = weight_updater.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=lambda: runner,
    )
    return runner.weight_updater


def asked(folder, updater, method, *arguments):
    folder.put_call(method, arguments)
    original = weight_updater.WeightUpdater.update_weights_from_tensor
    assert hooks.answer_calls(original, updater, [], LOAD_FORMAT) == (True, "Success")
    try:
        return str(folder.take_answers(1)[0])
    except UpdateError as error:
        return f"UpdateError: {error}"
    except Exception as error:  # noqa: BLE001 - of no transfer and no bucket
        return type(error).__name__


def ends():
    """Tokens that end a response, with our hooks: config.json says 5, and generation_config.json each of these."""
    given = {"none": None, "another": GenerationConfig(eos_token_id=[7, 8]), "no token": GenerationConfig()}
    found = {}
    for name, generation in given.items():
        config = SimpleNamespace(hf_config=SimpleNamespace(eos_token_id=5), hf_generation_config=generation)
        found[name] = sorted(ModelConfig._get_hf_eos_token_id(config))
    return found


def choices_in_the_kernel():
    """Whether a kernel of FlashInfer's chooses experts, if requests ask for them and if not."""
    config = topk.TopKConfig(top_k=2, routing_method_type=RoutingMethodType.Renormalize)
    found = []
    for is_told in (False, True):
        features = SimpleNamespace(enable_return_routed_experts=is_told)
        with mock.patch.object(
            runtime_context, "get_exec", lambda features=features: SimpleNamespace(features=features)
        ):
            found.append(topk._can_bypass_trtllm_routing(config))
    return found


def release(rank, store, says):
    """Release memory as a worker whose allocator takes its time in the second one; says when it has answered."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    runner = SimpleNamespace(model=torch.nn.Linear(2, 2))
    updater = SimpleNamespace(
        scheduler=None,
        is_fully_idle=lambda **_: True,
        offload_tags=set(),
        memory_saver_adapter=SimpleNamespace(pause=lambda _tag: time.sleep(2 * rank)),
        flush_cache=lambda: None,
        tp_worker=SimpleNamespace(model_runner=runner),
        tp_cpu_group=group,
        _assert_weight_cache_inactive=lambda _call: None,
    )
    asked = ReleaseMemoryOccupationReqInput(tags=["weights"])
    SchedulerWeightUpdaterManager.release_memory_occupation(updater, asked)
    says.put((rank, time.monotonic()))
    dist.barrier(group)


def seconds_of_an_answer_before_all_released():
    """How long before the second worker of two the first one says that memory was released."""
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        says = forked.SimpleQueue()
        workers = [forked.Process(target=release, args=(rank, f"{folder}/store", says)) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        said = dict(says.get() for _ in workers)
        for worker in workers:
            worker.join()
    return said[1] - said[0]


def loops():
    """Each loop that a scheduler may be in -> whether it looks if it is paused."""
    named = re.findall(r"scheduler\.(event_loop_\w+)\(", inspect.getsource(scheduler._dispatch_event_loop_once))
    # One is there on Apple's chips alone.
    there = {name: getattr(scheduler.Scheduler, name) for name in named if hasattr(scheduler.Scheduler, name)}
    return {name: "self._engine_paused" in inspect.getsource(loop) for name, loop in there.items()}


def preloading(folder):
    """The library that a worker of a server that sleeps preloads, and where its loader looks for what that needs."""
    runtime = Path(folder, "nvidia", "cu13", "lib", "libcudart.so.13")
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    saver = TorchMemorySaverAdapter.create(enable=True)
    with (
        mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": "/own"}),
        mock.patch.object(torch, "__file__", f"{folder}/torch/__init__.py"),
        # torch_memory_saver asks for it, too.
        mock.patch.object(torch.version, "cuda", "13.0"),
        saver.configure_subprocess(),
    ):
        places = [os.path.relpath(each, folder) for each in os.environ["LD_LIBRARY_PATH"].split(":")[1:]]
        return {"library": os.environ["LD_PRELOAD"], "places": places}


def experts_in_blocks():
    """Kernel of experts -> whether SGLang leaves them as they were loaded in block FP8, and our reason if it may not.

    As on a GPU, without one: on a CPU it packs them for instructions that this one may lack.
    """
    found = {}
    for backend in MoeRunnerBackend:
        method = object.__new__(fp8.Fp8MoEMethod)
        method.__dict__ |= dict.fromkeys(("is_fp4_expert", "use_mxfp8", "convert_mxfp8_to_block"), False)
        method.block_quant = method._owns_moe_runner = True
        method.quant_config = SimpleNamespace(weight_block_size=[128, 128], is_checkpoint_fp8_serialized=True)
        method.moe_runner_config = SimpleNamespace(**dict.fromkeys(("gemm1_alpha", "gemm1_beta", "swiglu_limit")))
        method.moe_runner_config.gemm1_clamp_limit = None
        method.runner = SimpleNamespace(runner_backend=backend)
        layer = torch.nn.Module()
        layer.num_local_experts, layer.quant_method = 2, method
        for name, shape in {"w13_weight": (2, 512, 256), "w2_weight": (2, 256, 256)}.items():
            scales = torch.rand(shape[0], shape[1] // 128, shape[2] // 128)
            setattr(layer, name, torch.nn.Parameter(torch.randn(shape).to(torch.float8_e4m3fn), requires_grad=False))
            setattr(layer, f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        before = {name: (each, each.data_ptr(), each.float()) for name, each in layer.named_parameters()}
        with (
            mock.patch.object(fp8, "_is_cpu", False),
            mock.patch.object(fp8, "get_moe_runner_backend", return_value=backend),
            mock.patch.object(fp8.Fp8MoEMethod, "_prepare_hpc_ops_weights"),
        ):
            method.process_weights_after_loading(layer)
            reason = tracing._reason(layer)
        after = dict(layer.named_parameters())
        is_kept = all(
            after[name] is each and each.data_ptr() == place and torch.equal(each.float(), values)
            for name, (each, place, values) in before.items()
        )
        found[backend.value] = (is_kept and before.keys() == after.keys(), reason)
    return found


class SettledError(Exception):
    """SGLang has chosen how much memory it takes."""


SHARES = (
    {},
    {"tp_size": 8, "max_running_requests": 96},
    {"chunked_prefill_size": 4096, "max_total_tokens": 3000},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 16384},
    {"disable_cuda_graph": True},
    {"disable_prefill_cuda_graph": True},
    {"cuda_graph_backend_decode": "disabled"},
    {"cuda_graph_bs_decode": [1, 8, 64]},
    {"max_running_requests": None},
    {"max_running_requests": None, "tp_size": 4},
    {"moe_a2a_backend": "deepep", "tp_size": 8},
    {"moe_a2a_backend": "deepep", "tp_size": 8, "deepep_mode": "normal"},
    {"moe_a2a_backend": "deepep", "disable_prefill_cuda_graph": True},
)
"""Arguments on which the share depends that SGLang takes of a GPU."""


def share_of(folder, arguments, mib):
    """SGLang's own choice of `mem_fraction_static`, for a GPU of so many MiB."""
    given = ServerArgs(**{**server_arguments(folder, arguments, 1, "key"), "device": "cuda"})
    run, found = pipeline.run_hook, []

    def until_settled(hook, record):
        run(hook, record)
        if hook is memory_hook.handle_gpu_memory_settings:
            found.append(resolving_view(record).mem_fraction_static)
            raise SettledError

    with (
        mock.patch.object(memory_hook, "get_device_memory_capacity", return_value=mib),
        mock.patch.object(pipeline, "run_hook", until_settled),
        suppress(SettledError),
    ):
        given.resolve_once()
    return found[0]


def shares(folders):
    """Share by SGLang and by us, of GPUs of 16, 24, 46, 80, 141 and 180 GiB, for a model of each folder."""
    found = []
    with mock.patch.object(device, "backend", return_value="nccl"):
        for folder, arguments, mib in product(folders, SHARES, (16384, 24564, 46068, 81559, 143771, 183359)):
            # By itself on a GPU alone.
            switched_off = {"disable_cuda_graph", "disable_prefill_cuda_graph"} & arguments.keys()
            given = arguments if switched_off else {"cuda_graph_backend_prefill": "breakable", **arguments}
            is_latent = "kv_lora_rank" in json.loads((Path(folder) / "config.json").read_text())
            by_us = SGLANG.memory_share(arguments, mib * 2**20, is_latent)
            found.append((Path(folder).name, str(arguments), mib, share_of(Path(folder), given, mib), by_us))
    return found


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        answers = updates(CallFolder.of_this_server())
    early = [seconds_of_an_answer_before_all_released()]
    hooks.register()
    HookRegistry.apply_hooks()
    early.append(seconds_of_an_answer_before_all_released())
    with tempfile.TemporaryDirectory() as folder:
        preloads = preloading(folder)
    found = {
        "early": early,
        "preloads": preloads,
        "shares": shares(sys.argv[1:]),
        "updates": answers,
        "ends": ends(),
        "choices in the kernel": choices_in_the_kernel(),
        "loops": loops(),
        "expert kernels": [each.value for each in MoeRunnerBackend],
        "experts in blocks": experts_in_blocks(),
        "expert exchanges": [each.value for each in MoeA2ABackend],
        "variables": [name for name, field in vars(Envs).items() if isinstance(field, EnvField)],
        "arguments": [field.name for field in record_fields(ServerArgs)],
        "sampling": {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
