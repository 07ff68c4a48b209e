"""Jobs of the quickstart, set up for a benchmark: a tiny model after its warm-up, or the real one."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from megarl.output.places import EXPORT
from megarl.quickstart import digits
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.rows import write_rows
from megarl.quickstart.smollm2 import write_smollm2
from megarl.quickstart.tiny_models import write_tiny_model

REWARD = f"{digits.__file__}:share_of_digits"
"""A reward in which all responses differ, so that each has an advantage to train on."""
# As in the quickstart: the two ranks hold different experts, and a dense model has none to shard.
TINY: Mapping[str, tuple[str, ...]] = {
    "qwen3_moe": (),
    "qwen3": ("megatron.expert_model_parallel_size=1",),
}
"""The available tiny models, with the overrides for their layouts."""
COUNT = "Count from {first} to 100."
SHORT = "What is {first} + {second}? Answer with the number only."
REAL: Mapping[str, tuple[tuple[str, ...], int]] = {
    "smollm2_equal": ((COUNT,), 16),
    "smollm2_spread": ((SHORT, SHORT, SHORT, COUNT), 128),
}
"""Workloads of the real model: its prompts, used in turn, and the longest response.

Counting to 100 takes more than 16 tokens, so in the first workload seven of eight responses reach the limit before any
training; with each step more of them become shorter. In the second, three of four prompts are sums, which take about 14
tokens, and counting continues to the limit: lengths vary by a factor of 8 and more.
"""
MODELS = (*TINY, *REAL)
MEGARL = (sys.executable, "-m", "megarl.cli.main")


@dataclass(frozen=True)
class Workload:
    """A training job, as arguments of `megarl train`."""

    arguments: tuple[str, ...]

    def of_run(self, output_dir: Path, steps: int) -> list[str]:
        """The arguments of one run of `steps` steps, without held-out prompts and so without evaluations."""
        return [*self.arguments, f"output_dir='{output_dir}'", f"loop.steps={steps}", "checkpoint.every=0"]


def environment(threads: int | None) -> dict[str, str]:
    """The environment of a run: `threads` math threads per process (None: the default), no GPU, no network."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {
        **inherited,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def prepare(model: str, folder: Path) -> Workload:
    """Write the model and the data of the workload `model` to `folder`."""
    logging.disable_progress_bar()
    return _real(*REAL[model], folder) if model in REAL else _tiny(model, folder)


def _real(wordings: Sequence[str], longest: int, folder: Path) -> Workload:
    """The pretrained model in float32, as TRL trains on a CPU, and prompts with long or short answers."""
    write_smollm2(folder / "model", dtype=torch.float32)
    numbers = np.random.default_rng(0).integers(2, 40, (1000, 2)).tolist()
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": wordings[i % len(wordings)].format(first=a, second=b)}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(numbers)
    ]
    write_rows(folder / "train.parquet", rows)
    return Workload(
        (
            *("--config-name", "quickstart_smollm2"),
            *("model.dtype=fp32", "rollout.engine_args.dtype=float32", "rollout.engine_args.max_model_len=256"),
            "refit.bucket_bytes=134217728",
            f"reward.function='{REWARD}'",
            *("loop.prompts_per_step=4", "data.shuffle=false", f"rollout.max_response_tokens={longest}"),
            f"model.path='{folder / 'model'}'",
            f"data.train_files=['{folder / 'train.parquet'}']",
        )
    )


def _tiny(model: str, folder: Path) -> Workload:
    """A tiny model, warmed up as in the quickstart."""
    untrained = write_tiny_model(model, folder / "model")
    files = write_arithmetic(folder / "data")
    warm_up = [
        *("sft", "--config-name", "quickstart_sft", *TINY[model]),
        f"output_dir='{folder / 'warm_up'}'",
        f"model.path='{untrained}'",
        f"sft.train_files=['{files.sft_train}']",
        f"sft.eval_files=['{files.sft_eval}']",
    ]
    subprocess.run([*MEGARL, *warm_up], env=environment(threads=1), check=True, stdout=subprocess.DEVNULL)
    return Workload(
        (
            *("--config-name", "quickstart", *TINY[model]),
            # The learning rate would decay to its end within the few steps of a benchmark.
            "megatron.lr_decay_style=constant",
            f"model.path='{folder / 'warm_up' / EXPORT}'",
            f"data.train_files=['{files.train}']",
        )
    )
