"""The methods of the ranks' program, for calls of it: their types are checked, and nothing of Megatron is imported."""

from typing import TYPE_CHECKING

from megarl.cluster.workers.method_names import MethodNames

if TYPE_CHECKING:
    from megarl.cluster.trainer.trainer_worker import TrainerWorker
else:
    TrainerWorker = MethodNames()

__all__ = ["TrainerWorker"]
