"""By how much the quickstart's jobs differ where there are GPUs."""

from megarl.rollout import engine_kind
from megarl.schema import RolloutConfig

# Float32 is what makes results on a CPU repeat; a GPU's kernels are made for bf16.
BF16 = ("model.dtype=bf16", "rollout.engine_args.dtype=bfloat16")
_ONE_RANK = ("cluster.trainer_ranks=1", "megatron.expert_model_parallel_size=1")
_SHARE = 0.4
ACCURACY_TOLERANCE = 0.02
"""By how much the accuracy of the export may differ on GPUs, where an answer depends on what it is batched with, and
from that of an engine in a number format."""


def overrides_for(gpus: int, engine: str = RolloutConfig.engine) -> tuple[str, ...]:
    """Overrides for a machine with so many GPUs: the trainer's two ranks and the engine have one each, if there are."""
    if gpus == 0:
        return ()
    if gpus == 1:
        arguments = engine_kind(engine).gpu_share(_SHARE)
        shared = (f"rollout.engine_args.{name}={value}" for name, value in arguments.items())
        return (*BF16, *_ONE_RANK, f"cluster.gpu_share={_SHARE}", *shared)
    return (*BF16, *_ONE_RANK) if gpus == 2 else BF16
