"""Changes to the quickstart's jobs on GPUs."""

from megarl.rollout import engine_kind
from megarl.schema import RolloutConfig

# Float32 makes results on a CPU reproducible; GPU kernels are made for bf16.
BF16 = ("model.dtype=bf16", "rollout.engine_args.dtype=bfloat16")
_ONE_RANK = ("cluster.trainer_ranks=1", "megatron.expert_model_parallel_size=1")
_SHARE = 0.4
ACCURACY_TOLERANCE = 0.02
"""Allowed difference of the export's accuracy on GPUs, where results depend on batching, and in number formats."""


def overrides_for(gpus: int, engine: str = RolloutConfig.engine) -> tuple[str, ...]:
    """Overrides for `gpus` GPUs: one each for the trainer's two ranks and the engine, if there are enough."""
    if gpus == 0:
        return ()
    if gpus == 1:
        arguments = engine_kind(engine).gpu_share(_SHARE)
        shared = (f"rollout.engine_args.{name}={value}" for name, value in arguments.items())
        return (*BF16, *_ONE_RANK, f"cluster.gpu_share={_SHARE}", *shared)
    return (*BF16, *_ONE_RANK) if gpus == 2 else BF16
