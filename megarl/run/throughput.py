"""How well a step used the devices."""

from collections.abc import Sequence
from functools import cached_property

from converters.cost.devices import peak_bf16_flops
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.tracking import MetricValue


class Throughput:
    """Metrics of a step from its tokens, its seconds and the work that the policy's ranks counted."""

    def __init__(self, trainer: TrainerGroup, stages: Sequence[str], gpus: int, peak_tflops: float | None) -> None:
        """`stages` are those in which the ranks compute, `gpus` all that the run has; see `tracking.peak_tflops`."""
        self._trainer, self._stages, self._gpus, self._peak_tflops = trainer, stages, gpus, peak_tflops

    def end_step(self, timings: dict[str, float]) -> dict[str, MetricValue]:
        """`timings`, those of `Clock.end_step`, and what follows from them for GPUs and for the policy's ranks."""
        computing = sum(timings.get(f"seconds/{stage}", 0.0) for stage in self._stages)
        metrics: dict[str, MetricValue] = dict(timings)
        if self._gpus:
            metrics["throughput/tokens_per_s_per_gpu"] = timings["throughput/tokens_per_s"] / self._gpus
        if computing:
            flops = self._trainer.take_flops() / len(self._trainer)
            metrics["throughput/trainer_tflops"] = flops / computing / 1e12
            if self._peak_flops:
                metrics["throughput/mfu"] = flops / computing / self._peak_flops
        return metrics

    @cached_property
    def _peak_flops(self) -> float | None:
        if self._peak_tflops is not None:
            return 1e12 * self._peak_tflops
        return peak_bf16_flops(self._trainer.device_name())
