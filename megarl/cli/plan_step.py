"""The options of `megarl plan` for a whole step, and the step that they describe."""

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from converters.cost.devices import Device
    from megarl.planning.refit import PlannedRefit
    from megarl.planning.step.prediction import PlannedStep

DEFAULT_DEVICE = "H100"
_MICRO_BATCH = 16384
_RECOMPUTE = ("none", "full")
_WORK = (
    ("--prompts", "prompts", int, "prompts of a step (64)"),
    ("--samples", "samples", int, "responses to each prompt (8)"),
    ("--prompt-tokens", "prompt_tokens", float, "mean length of a prompt (512; half of the recipe's longest)"),
    ("--response-tokens", "response_tokens", float, "mean length of a response (half of the longest)"),
    ("--max-response-tokens", "max_response_tokens", int, "the longest response (512)"),
    ("--micro-batch-tokens", "max_tokens_per_micro_batch", int, "tokens of a micro-batch (16384, or the longest)"),
    ("--updates", "updates", int, "optimizer steps of a step (1)"),
    (
        "--log-prob-passes",
        "log_prob_passes",
        int,
        "forward passes before the update (those of the recipe; 1 with several updates)",
    ),
)
"""Option, field of `Workload`, type, help."""
OPTION_OF_FIELD = {f"the step's {field}": option for option, field, *_ in _WORK}
"""Names of `Workload` fields in error messages -> the options that set them."""
WORK_OF_A_STEP = {
    "prompts": 64,
    "samples": 8,
    "prompt_tokens": 512.0,
    "response_tokens": None,
    "max_response_tokens": 512,
    "max_tokens_per_micro_batch": None,
    "updates": 1,
    "log_prob_passes": None,
}
"""The fields -> their defaults, if neither a recipe nor the command line sets them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("step")
    for name, field, kind, text in _WORK:
        group.add_argument(name, dest=field, type=kind, metavar="N", help=text)
    group.add_argument("--recompute", choices=_RECOMPUTE, help="layers that are computed again in the backward pass")
    group.add_argument("--staleness", type=int, metavar="N", help="versions that a trained token may be old (0)")
    group.add_argument(
        "--expert-load",
        type=float,
        default=1.2,
        metavar="X",
        help="tokens of the experts of the busiest rank, of the mean (%(default)s)",
    )
    group.add_argument(
        "--prediction-layers",
        type=int,
        metavar="N",
        help="layers of multi-token prediction in the trainer (those of the policy's config.json)",
    )
    group.add_argument(
        "--search", action="store_true", help="propose sizes for the model and --gpus in all, the fastest that fit"
    )


def described_device(name: str, memory_gbyte: float | None) -> "Device":
    """A device of the table, with a different memory size if one is given. Raises UserError for an unknown device."""
    from converters.cost.devices import DEVICES

    if name not in DEVICES:
        raise UserError(f"--device {name} is none of {', '.join(DEVICES)}{did_you_mean(name, DEVICES)}")
    if memory_gbyte is None:
        return DEVICES[name]
    if not 0 < memory_gbyte < math.inf:
        raise UserError(f"--gpu-gbyte {memory_gbyte:g} is no memory; give the GB of a GPU")
    return replace(DEVICES[name], memory_bytes=memory_gbyte * 1e9)


def planned_step(options: argparse.Namespace, refit: "PlannedRefit") -> "PlannedStep":
    """The step that the options describe. Raises UserError for an impossible one."""
    from megarl.planning.memory.trainer import TrainingOptions
    from megarl.planning.refit import read_trained_model
    from megarl.planning.step.prediction import EngineOptions, PlannedStep
    from megarl.planning.workload import Workload

    work = {field: getattr(options, field) for _, field, *_ in _WORK}
    if work["response_tokens"] is None:
        work["response_tokens"] = max(1.0, work["max_response_tokens"] / 2)
    if work["log_prob_passes"] is None:
        work["log_prob_passes"] = int(work["updates"] > 1)
    longest = math.ceil(work["prompt_tokens"] + work["max_response_tokens"])
    if work["max_tokens_per_micro_batch"] is None:
        work["max_tokens_per_micro_batch"] = max(_MICRO_BATCH, longest)
    elif work["max_tokens_per_micro_batch"] < longest:
        raise UserError(
            f"--micro-batch-tokens {work['max_tokens_per_micro_batch']} has no room for the longest response with a"
            f" mean prompt, {longest} tokens: raise it to {longest}, or lower --max-response-tokens"
        )
    if not 1 <= options.expert_load < math.inf:
        raise UserError(f"--expert-load {options.expert_load:g} must be a number of at least 1, the mean")
    if options.staleness < 0:
        raise UserError(f"--staleness {options.staleness} is too small: it must be at least 0")
    held = read_trained_model(options.model, options.prediction_layers)
    training = TrainingOptions.of(options.megatron, options.training_dtype)
    if options.recompute is not None:
        training = replace(training, recompute=replace(training.recompute, is_full=options.recompute == "full"))
    device = described_device(options.device, options.gpu_gbyte)
    share = options.memory_share(device.memory_bytes, refit.engine_architecture.multi_latent_attention)
    return PlannedStep(
        refit=refit,
        workload=Workload(**work),
        device=device,
        training=replace(
            training,
            expert_load=options.expert_load,
            lora=options.lora,
            predicts=options.mtp_training != "none" and options.lora is None,
            keeps_reference=options.keeps_reference,
        ),
        engine=EngineOptions(
            utilization=share,
            is_eager=options.is_eager,
            kv_bytes=options.kv_bytes,
            kv_ranks=options.kv_ranks,
            prefill_tokens=options.prefill_tokens,
            most_samples=options.most_samples,
            computes_beside=options.computes_beside,
        ),
        staleness=options.staleness,
        predicting=held,
        sends_whole_tensors=options.sends_whole_tensors,
    )
