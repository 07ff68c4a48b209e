"""Metrics of how well a step used the GPUs."""

from collections.abc import Sequence
from functools import cached_property

from converters.cost.devices import peak_bf16_flops
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.tracking import MetricValue


class Throughput:
    """Computes throughput metrics of a step from its tokens, seconds and the FLOPs that the policy's ranks count."""

    def __init__(
        self,
        trainer: TrainerGroup,
        computing: Sequence[str],
        gpus: int,
        peak_tflops: float | None,
        waiting: Sequence[str] = (),
    ) -> None:
        """Name the stages in which the ranks compute, and those in which they wait for responses and rewards.

        `gpus` is the number of all GPUs of the run; `peak_tflops` is `tracking.peak_tflops`.
        """
        self._trainer, self._computing, self._waiting = trainer, computing, waiting
        self._gpus, self._peak_tflops = gpus, peak_tflops

    def begin_steps(self) -> None:
        """Count from here on: what the ranks computed before belongs to no step."""
        self._trainer.take_flops()

    def end_step(self, timings: dict[str, float]) -> dict[str, MetricValue]:
        """Add metrics per GPU and of the policy's ranks to `timings`, the result of `Clock.end_step`."""
        metrics: dict[str, MetricValue] = dict(timings)
        if self._waiting:
            metrics["throughput/trainer_idle"] = _seconds(self._waiting, timings) / timings["seconds/step"]
        if self._gpus:
            metrics["throughput/tokens_per_s_per_gpu"] = timings["throughput/tokens_per_s"] / self._gpus
        if computing := _seconds(self._computing, timings):
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


def _seconds(stages: Sequence[str], timings: dict[str, float]) -> float:
    return sum(timings.get(f"seconds/{stage}", 0.0) for stage in stages)
