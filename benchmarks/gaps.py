"""How far engine and trainer are apart after every refit: families of models in each engine and number format.

Tiny models of the quickstart whose sizes fit the blocks of all formats, warmed up as there, the trainer in bf16. Each
is trained for a few steps with every engine; what is shown is |engine - trainer| of the sampled tokens' log-probs.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from machine import at_least_one, describe, give_out
from transformers.utils import logging
from workload import MEGARL, environment

from converters.number_formats import AS_TRAINED
from megarl.output.places import EXPORT
from megarl.quickstart.arithmetic import ArithmeticFiles, write_arithmetic
from megarl.quickstart.gpus import BF16
from megarl.quickstart.models import MODELS
from megarl.rollout import engine_kind
from megarl.schema import RolloutConfig
from megarl.tracking import read_history

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
FORMATS: Mapping[str, tuple[str, ...]] = {
    "vllm": (AS_TRAINED, "fp8_block", "fp8_block_ue8m0", "int8_channel", "mxfp8", "nvfp4"),
    "sglang": (AS_TRAINED, "fp8_block", "fp8_block_ue8m0", "int8_channel"),
    "transformers": (AS_TRAINED,),
}
"""Engine -> the forms of weights that it holds."""
AS_COMPUTED = "as_computed"
KEYS_AND_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        AS_COMPUTED: (),
        "fp8": ("+rollout.engine_args.kv_cache_dtype=fp8",),
        "fp8, bound scales": ("+rollout.engine_args.kv_cache_dtype=fp8", "rollout.kv_scales=bound"),
    },
    "sglang": {AS_COMPUTED: (), "fp8": ("+rollout.engine_args.kv_cache_dtype=fp8_e4m3",)},
    "transformers": {AS_COMPUTED: ()},
}
"""Engine -> the forms of keys and values that it keeps, each with its overrides."""
GAP = "log_prob_difference/mean"
HEAD = (
    "| model | engine | weights | keys and values | mean, nats | largest of a step | bytes of a refit |\n"
    "|---|---|---|---|---:|---:|---:|"
)


class Lab:
    """A warmed-up model of each family, and runs on them."""

    def __init__(self, folder: Path, steps: int) -> None:
        logging.disable_progress_bar()
        self._folder, self._steps = folder, steps
        self._files = write_arithmetic(folder / "data")
        self._warmed_up: dict[str, Path] = {}

    def gaps(self, family: str, engine: str, weights: str, kept: str) -> list[dict[str, Any]]:
        """The metrics of each step of a run."""
        output = self._folder / f"{family}_{engine}_{weights}_{kept.replace(', ', '_').replace(' ', '_')}"
        self._megarl(
            *("train", "--config-name", "quickstart", *MODELS[family].overrides, *BF16, *_context(engine)),
            *(f"rollout.engine={engine}", f"rollout.weights={weights}", f"loop.steps={self._steps}"),
            *KEYS_AND_VALUES[engine][kept],
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
        # Any format has it written with the sizes that fit all of them.
        model = chosen.write(self._folder / family, "fp8_block")
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
    """Overrides for an engine that calls the length of a context otherwise than the recipe does."""
    usual, own = (engine_kind(name).context_argument for name in (RolloutConfig.engine, engine))
    if own != usual:
        yield f"~rollout.engine_args.{usual}"
        yield f"+rollout.engine_args.{own}=32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--engines", nargs="+", choices=FORMATS, default=["vllm", "transformers"])
    parser.add_argument("--weights", nargs="+", help="forms of weights, which are else all that an engine holds")
    parser.add_argument(
        "--keys-and-values", nargs="+", choices=KEYS_AND_VALUES["vllm"], default=[AS_COMPUTED], help="their forms"
    )
    parser.add_argument("--steps", type=at_least_one, default=10)
    parser.add_argument("--write", type=Path, help="file for the page; each row is also printed")
    options = parser.parse_args()
    page = [f"`make benchmark-gaps`, {date.today()}, {describe(ROOT)}. {options.steps} steps each.", "", HEAD]
    print("\n".join(page), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), options.steps)
        for family in options.models:
            for engine in options.engines:
                weights = [each for each in FORMATS[engine] if each in (options.weights or FORMATS[engine])]
                kept = [each for each in options.keys_and_values if each in KEYS_AND_VALUES[engine]]
                for held_in, kept_in in product(weights, kept):
                    lines = lab.gaps(family, engine, held_in, kept_in)
                    gaps = [line[GAP] for line in lines]
                    cells = family, engine, held_in, kept_in, f"{mean(gaps):.4f}", f"{max(gaps):.4f}"
                    page.append(f"| {' | '.join(cells)} | {max(line['refit/bytes'] for line in lines):,.0f} |")
                    print(page[-1], flush=True)
    if options.write:
        give_out("\n".join(["# Engine and trainer on the same weights", "", *page, ""]), options.write)


if __name__ == "__main__":
    main()
