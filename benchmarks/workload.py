"""The quickstart's job: its model after the warm-up, and its prompts, made anew for a benchmark."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

# As in the quickstart: the two ranks hold different experts, and a dense model has none to cut.
MODELS: Mapping[str, tuple[str, ...]] = {
    "qwen3_moe": (),
    "qwen3": ("megatron.expert_model_parallel_size=1",),
}
"""The models to choose from, with what their layout needs."""
MEGARL = (sys.executable, "-m", "megarl.cli.main")


@dataclass(frozen=True)
class Workload:
    """What is trained, as arguments of `megarl train`."""

    arguments: tuple[str, ...]

    def of_run(self, output_dir: Path, steps: int) -> list[str]:
        """The arguments of one run of `steps` steps. It has no held-out prompts, so no step is an evaluation."""
        return [*self.arguments, f"output_dir='{output_dir}'", f"loop.steps={steps}", "checkpoint.every=0"]


def environment(threads: int) -> dict[str, str]:
    """The environment of a run: `threads` for the maths of a process, no GPU, no network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def prepare(model: str, folder: Path) -> Workload:
    """Write `model` and the data to `folder` and warm the model up as the quickstart does."""
    logging.disable_progress_bar()
    untrained = write_tiny_model(model, folder / "model")
    files = write_arithmetic(folder / "data")
    warm_up = [
        *("sft", "--config-name", "quickstart_sft", *MODELS[model]),
        f"output_dir='{folder / 'warm_up'}'",
        f"model.path='{untrained}'",
        f"sft.train_files=['{files.sft_train}']",
        f"sft.eval_files=['{files.sft_eval}']",
    ]
    subprocess.run([*MEGARL, *warm_up], env=environment(threads=1), check=True, stdout=subprocess.DEVNULL)
    return Workload(
        (
            *("--config-name", "quickstart", *MODELS[model]),
            # The rate would fall to its end within the few steps of a benchmark.
            "megatron.lr_decay_style=constant",
            f"model.path='{folder / 'warm_up' / EXPORT}'",
            f"data.train_files=['{files.train}']",
        )
    )
