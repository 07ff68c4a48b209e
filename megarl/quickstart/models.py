"""Models that the quickstart can train, each with its data, its recipe and, if needed, its warm-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from converters.number_formats import AS_TRAINED
from megarl.quickstart.arithmetic import ArithmeticFiles, write_arithmetic
from megarl.quickstart.gpus import BF16
from megarl.quickstart.questions import QuestionFiles, write_questions
from megarl.quickstart.smollm2 import write_smollm2
from megarl.quickstart.tiny_models import IN_BLOCKS, write_tiny_model

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "sync": (),
    "async": ("schedule.max_staleness=1", "schedule.in_flight=recompute"),
}
"""Value of `megarl quickstart --schedule` -> overrides: async is one version ahead."""


UNQUANTISED = "bf16"
"""Value of `megarl quickstart --weights` for a job like that of a number format, but without one, for comparison."""

_MEASURED = (AS_TRAINED, UNQUANTISED, "fp8_block")
"""Weight formats of engines whose quickstarts were run to the last step: all in vLLM, all but `UNQUANTISED` in SGLang.
"""


@dataclass(frozen=True)
class WarmUp:
    """Supervised fine-tuning of a randomly initialised model, by the recipe `quickstart_sft`."""

    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuickstartModel:
    """A model, its data, and the overrides of its job on top of `recipe`."""

    about: str
    write_model: Callable[[Path], Path]
    write_data: Callable[[Path], ArithmeticFiles | QuestionFiles]
    recipe: str = "quickstart"
    overrides: tuple[str, ...] = ()
    warm_up: WarmUp | None = None
    write_in_blocks: Callable[[Path], Path] | None = None
    """Writes it with sizes that fit the blocks of number formats; None if it has one size only, which may not fit."""
    in_blocks: tuple[str, ...] = ()
    """Overrides of the job for a model with these sizes."""
    bar: float = 0.6
    """Minimum held-out accuracy after all steps; 0.71 and more was measured."""

    def write(self, folder: Path, weights: str) -> Path:
        """Write the model for engines with weights in the format `weights`."""
        if weights == AS_TRAINED or self.write_in_blocks is None:
            return self.write_model(folder)
        return self.write_in_blocks(folder)

    def bar_in_format(self, weights: str) -> float | None:
        """The minimum accuracy with engines with weights in the format `weights`; None if it was never measured."""
        return self.bar if weights in _MEASURED else None

    def in_format(self, weights: str) -> tuple[str, ...]:
        """Overrides for engines with weights in the format `weights`; the trainer's weights are then in bf16.

        Tokens are weighted by importance ratios, as engine and trainer differ slightly as policies. This includes
        `UNQUANTISED`, so that it differs only in the format.
        """
        if weights == AS_TRAINED:
            return ()
        correction = "algorithm.corrections=[{kind: token_importance, high: 2.0}]"
        held_in = AS_TRAINED if weights == UNQUANTISED else weights
        return (*BF16, f"rollout.weights={held_in}", correction, *self.in_blocks)


def _tiny(
    name: str, overrides: tuple[str, ...] = (), warm_up: tuple[str, ...] = (), in_blocks: tuple[str, ...] = ()
) -> QuickstartModel:
    return QuickstartModel(
        about=f"a tiny {name} and the sums below 200",
        write_model=partial(write_tiny_model, name),
        write_data=write_arithmetic,
        overrides=overrides,
        warm_up=WarmUp(warm_up),
        in_blocks=in_blocks,
        write_in_blocks=partial(write_tiny_model, name, fields=IN_BLOCKS[name]),
    )


# A dense model has no experts to shard: its two ranks are data-parallel.
_DENSE = ("megatron.expert_model_parallel_size=1",)

MODELS: Mapping[str, QuickstartModel] = {
    "qwen3_moe": _tiny("qwen3_moe"),
    "qwen3": _tiny("qwen3", (*_DENSE, "loop.steps=240"), warm_up=(*_DENSE, "megatron.lr=1e-3")),
    # Its projections out of the latent have 512 inputs, so a weight change has five times the effect on the output. It
    # learns addition suddenly, so the warm-up evaluates more often.
    "deepseek_v3": _tiny(
        "deepseek_v3",
        warm_up=("megatron.lr=1e-3", "sft.eval_every=3", "sft.stop_at_exact_match=0.25"),
        # After 200 steps it is at 0.58.
        in_blocks=("loop.steps=400",),
    ),
    "smollm2": QuickstartModel(
        about="SmolLM2-135M-Instruct and sums in words",
        write_model=write_smollm2,
        write_data=write_questions,
        recipe="quickstart_smollm2",
    ),
}
"""Value of `megarl quickstart --model` -> the model."""
