"""Published training steps, compared with the seconds that `megarl plan` predicts for the same sizes and work.

Needs neither GPUs nor weights: the models' config.json files are in configs/models. Writes Markdown.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from converters.cost.devices import DEVICES
from converters.layouts.parallel_sizes import ParallelSizes
from converters.number_formats import FP8_BLOCK, NumberFormat
from megarl.planning.cluster import Cluster
from megarl.planning.memory.activations import Recompute
from megarl.planning.memory.trainer import TrainingOptions
from megarl.planning.refit import PlannedRefit, engine_sizes, read_model
from megarl.planning.step.prediction import EngineOptions, PlannedStep, StepPrediction
from megarl.planning.workload import Workload

NEMO_RL = "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
VERL = "https://github.com/verl-project/verl/blob/main/docs/perf/dpsk.md"
PROMPT_TOKENS = 100
"""An estimate, as it is not published: a question of OpenMathInstruct-2."""
EXPERT_LOAD = 1.2
_COLUMNS = ("run", "GPUs", "published, s", "predicted, s", "predicted / published", "rollout", "training", "refit")


@dataclass(frozen=True)
class Run:
    """A published run: `trainer` is its TP, CP, EP, PP and the numbers of layers in its first and last stages."""

    name: str
    model: str
    device: str
    gpus: int
    """In total."""
    trainer: tuple[int, int, int, int, int | None, int | None]
    engine_tp: int
    sequence_tokens: int
    """Mean length of a prompt plus its response."""
    longest: int
    """Longest sequence, and number of tokens in a micro-batch of packed sequences."""
    seconds: float
    source: str = NEMO_RL
    prompts: int = 32
    samples: int = 16
    staleness: int = 0
    """With 1, half of the GPUs train and half sample."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of `Workload`."""
    number_format: NumberFormat | None = None
    is_eager: bool = False
    optimizer_bytes: float = 12
    recompute: bool = True


_16 = (1, 1, 16, 16, 3, 2)
_32 = (1, 1, 32, 16, 3, 2)
_8 = (1, 1, 16, 8, 7, 6)
_QWEN: Mapping[str, Any] = {"longest": 8192, "prompts": 16, "samples": 32}
RUNS: Sequence[Run] = (
    Run("DeepSeek-V3 671B", "deepseek_v3", "H100", 256, _16, 32, 701, 1536, 134),
    Run("DeepSeek-V3 671B", "deepseek_v3", "H100", 512, _32, 32, 697, 1536, 111),
    Run("DeepSeek-V3 671B, one step off", "deepseek_v3", "H100", 512, _16, 32, 710, 1536, 64.1, staleness=1),
    Run(
        "DeepSeek-V3 671B, one step off, fp8",
        "deepseek_v3",
        "H100",
        512,
        _16,
        16,
        721,
        1536,
        59.2,
        staleness=1,
        number_format=FP8_BLOCK,
    ),
    Run("DeepSeek-V3 671B", "deepseek_v3", "GB200", 128, _8, 32, 711, 1536, 108),
    Run("DeepSeek-V3 671B", "deepseek_v3", "GB200", 256, _8, 32, 700, 1536, 98.7),
    Run(
        "DeepSeek-V3 671B, verl",
        "deepseek_v3",
        "H20",
        96,
        (8, 1, 8, 12, None, 6),
        32,
        1960 + PROMPT_TOKENS,
        8192 + PROMPT_TOKENS,
        1700,
        source=VERL,
        prompts=96,
        samples=8,
        others={"updates": 3, "log_prob_passes": 2, "max_tokens_per_micro_batch": 10240},
        is_eager=True,
        optimizer_bytes=0,
    ),
    Run("Qwen3-235B-A22B", "qwen3_235b", "H100", 128, (2, 2, 16, 8, 11, 11), 16, 5698, seconds=395, **_QWEN),
    Run("Qwen3-235B-A22B", "qwen3_235b", "H100", 256, (2, 2, 16, 8, 11, 11), 16, 5713, seconds=312, **_QWEN),
    Run(
        "Qwen3-235B-A22B, one step off",
        "qwen3_235b",
        "H100",
        256,
        (4, 1, 16, 8, 11, 11),
        8,
        5721,
        seconds=231,
        staleness=1,
        **_QWEN,
    ),
    Run("Qwen3-235B-A22B", "qwen3_235b", "GB200", 64, (2, 2, 16, 4, 23, 23), 8, 5709, seconds=286, **_QWEN),
    Run("Qwen3-235B-A22B", "qwen3_235b", "GB200", 128, (2, 2, 16, 4, 23, 23), 8, 5693, seconds=345, **_QWEN),
    Run(
        "Qwen3-30B-A3B",
        "qwen3_30b_a3b",
        "H100",
        32,
        (1, 1, 8, 1, None, None),
        2,
        3203,
        4096,
        192,
        prompts=64,
        samples=32,
        recompute=False,
    ),
)


def predict(run: Run) -> StepPrediction:
    """Predict as `megarl plan` does, from the run's sizes and work."""
    device, colocated = DEVICES[run.device], not run.staleness
    training = run.gpus if colocated else run.gpus // 2
    architecture = read_model(run.model)
    refit = PlannedRefit(
        architecture=architecture,
        engine_architecture=architecture,
        trainer=_trainer(run, training),
        engine=engine_sizes(run.engine_tp, None),
        replicas=(run.gpus if colocated else run.gpus - training) // run.engine_tp,
        number_format=run.number_format,
        cluster=Cluster(
            gpus_per_node=device.nvlink_gpus,
            nvlink_gbyte_per_s=device.nvlink_bytes_per_s / 1e9,
            memory_gbyte_per_s=device.memory_bytes_per_s / 1e9,
        ),
        colocated=colocated,
    )
    options = TrainingOptions(
        recompute=Recompute(is_full=run.recompute), optimizer_bytes=run.optimizer_bytes, expert_load=EXPERT_LOAD
    )
    engine = EngineOptions(is_eager=run.is_eager)
    step = PlannedStep(refit, _work(run), device, options, engine, run.staleness, sends_whole_tensors=True)
    return StepPrediction(step)


def _work(run: Run) -> Workload:
    fields = {
        "prompts": run.prompts,
        "samples": run.samples,
        "prompt_tokens": PROMPT_TOKENS,
        "response_tokens": run.sequence_tokens - PROMPT_TOKENS,
        "max_response_tokens": run.longest - PROMPT_TOKENS,
        "max_tokens_per_micro_batch": run.longest,
    }
    return Workload(**{**fields, **run.others})


def _trainer(run: Run, ranks: int) -> ParallelSizes:
    tensor, context, expert, pipeline, first, last = run.trainer
    return ParallelSizes(
        world_size=ranks,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=pipeline,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|---|---|{'---:|' * (len(_COLUMNS) - 2)}"
    for run in RUNS:
        found = predict(run)
        seconds, training = found.seconds, sum(found.training_seconds.values())
        yield (
            f"| [{run.name}]({run.source}) | {run.gpus} {run.device} | {run.seconds:g} | {found.step_seconds:.0f} |"
            f" {found.step_seconds / run.seconds:.2f} | {seconds['rollout']:.0f} | {training:.0f} |"
            f" {seconds['refit']:.0f} |"
        )


def main() -> None:
    """Print the table; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    options = parser.parse_args()
    text = "\n".join(table()) + "\n"
    print(text, end="")
    if options.markdown is not None:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
