"""The methods of the rank program, for type-checked calls without importing Megatron."""

from typing import TYPE_CHECKING

from megarl.cluster.workers.method_names import MethodNames

if TYPE_CHECKING:
    from megarl.cluster.trainer.trainer_worker import TrainerWorker
else:
    TrainerWorker = MethodNames()

__all__ = ["TrainerWorker"]
