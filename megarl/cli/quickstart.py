"""Run the whole job on a CPU, in minutes: on a tiny model, or on a real pretrained one.

Writes a model and an arithmetic task, warms a tiny model up by supervised fine-tuning, trains by GRPO with two Megatron
ranks and one engine, exports the model, and confirms its accuracy in a fresh engine. `smollm2` is
SmolLM2-135M-Instruct, shipped in a Python package; it needs no warm-up.
"""

import argparse
import os

from converters.errors import UserError, names_as_given
from megarl.output.places import check_name
from megarl.process.phase import phase
from megarl.rollout import engine_kind

EXAMPLES = """examples:
  megarl quickstart
  megarl quickstart --model smollm2
  megarl quickstart --engine transformers
  megarl quickstart --weights fp8_block
  megarl quickstart --schedule async
  megarl quickstart --model deepseek_v3 --steps 20 --output-dir runs/mine
"""
TAKES_OVERRIDES = False
MODELS = ("qwen3_moe", "qwen3", "deepseek_v3", "smollm2")
SCHEDULES = ("sync", "async")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", choices=MODELS, default=MODELS[0], help="family of the tiny model, or smollm2 (%(default)s)"
    )
    parser.add_argument("--engine", metavar="NAME", help="engine that samples (default: that of rollout.engine)")
    parser.add_argument(
        "--weights",
        metavar="NAME",
        default="as_trained",
        help="what the engine holds the weights in: as_trained, or fp8_block, fp8_block_ue8m0, int8_channel, mxfp8"
        " or nvfp4, for which the tiny models are a little larger and in bf16, or bf16, the same without a number"
        " format (%(default)s)",
    )
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default=SCHEDULES[0],
        help="sync samples and learns in turn; async samples the next step meanwhile, with weights one version old"
        " (%(default)s)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of GRPO (default: those of the recipe)")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="where everything is written (default: runs/quickstart_MODEL)"
    )


def run(options: argparse.Namespace) -> int:
    """Run it; the report lists the paths of everything written."""
    # transformers shows a progress bar for GGUF regardless of its settings; tqdm reads this variable on import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    _check(options)
    with phase("loading the program"):
        from megarl.quickstart.run import main

    return main(options)


def _check(options: argparse.Namespace) -> None:
    """Check the options before heavy imports."""
    if options.engine is not None:
        with names_as_given({"rollout.engine": "--engine"}):
            engine_kind(options.engine)
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps {options.steps} is too small; give at least 1")
    if options.output_dir:
        check_name("--output-dir", options.output_dir)
