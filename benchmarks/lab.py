"""Short runs of warmed-up quickstart models in bf16, in sizes that fit the blocks of all number formats."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging
from workload import MEGARL, environment

from converters.number_formats import AS_TRAINED
from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import ArithmeticFiles, write_arithmetic
from megarl.quickstart.gpus import BF16
from megarl.quickstart.models import MODELS, UNQUANTISED
from megarl.rollout import engine_kind
from megarl.schema import RolloutConfig
from megarl.tracking import read_history

FORMATS: Mapping[str, tuple[str, ...]] = {
    "vllm": (AS_TRAINED, "fp8_block", "fp8_block_ue8m0", "int8_channel", "mxfp8", "nvfp4"),
    "sglang": (AS_TRAINED, "fp8_block", "fp8_block_ue8m0", "int8_channel"),
    "transformers": (AS_TRAINED,),
}
"""Engine -> the weight formats that it supports."""


class Lab:
    """A warmed-up model of each family, and runs of it."""

    def __init__(self, folder: Path, steps: int) -> None:
        logging.disable_progress_bar()
        self._folder, self._steps, self._runs = folder, steps, 0
        self._files = write_arithmetic(folder / "data")
        self._warmed_up: dict[str, Path] = {}

    def run(self, family: str, engine: str, weights: str, *overrides: str) -> list[dict[str, Any]]:
        """The metrics of each step of a run with these overrides."""
        output = self._folder / f"run_{self._runs}"
        self._runs += 1
        self._megarl(
            *("train", "--config-name", "quickstart", *MODELS[family].overrides, *BF16, *_context(engine)),
            *(f"rollout.engine={engine}", f"rollout.weights={weights}", f"loop.steps={self._steps}", *overrides),
            *(
                "loop.eval_every=0",
                "checkpoint.every=0",
                "megatron.lr_decay_style=constant",
                "tracking.loggers=[jsonl]",
            ),
            *(f"model.path='{self._model(family)}'", f"data.train_files=['{self._files.train}']"),
            f"output_dir='{output}'",
        )
        return list(read_history(output))

    def _model(self, family: str) -> Path:
        if family not in self._warmed_up:
            self._warmed_up[family] = self._warm_up(family, self._files)
        return self._warmed_up[family]

    def _warm_up(self, family: str, files: ArithmeticFiles) -> Path:
        chosen, output = MODELS[family], self._folder / f"{family}_warm_up"
        assert chosen.warm_up is not None
        model = chosen.write(self._folder / family, UNQUANTISED)
        self._megarl(
            *("sft", "--config-name", "quickstart_sft", *chosen.warm_up.overrides, *BF16, f"output_dir='{output}'"),
            *(
                f"model.path='{model}'",
                f"sft.train_files=['{files.sft_train}']",
                f"sft.eval_files=['{files.sft_eval}']",
            ),
        )
        return output / EXPORT

    def _megarl(self, *arguments: str) -> None:
        subprocess.run([*MEGARL, *arguments], env=environment(threads=1), check=True, stdout=subprocess.DEVNULL)


def _context(engine: str) -> Iterator[str]:
    """Overrides for an engine with another name for the context length than the recipe's engine."""
    usual, own = (engine_kind(name).context_argument for name in (RolloutConfig.engine, engine))
    if own != usual:
        yield f"~rollout.engine_args.{usual}"
        yield f"+rollout.engine_args.{own}=32"
