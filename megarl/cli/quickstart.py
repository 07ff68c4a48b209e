"""Run the whole job on a tiny model, on a CPU, in minutes.

Writes a model and an arithmetic task, warms the model up by supervised fine-tuning, trains it by GRPO with two
Megatron ranks and one vLLM engine, exports it, and lets a fresh engine confirm the accuracy.
"""

import argparse

from megarl.phase import phase

EXAMPLES = """examples:
  megarl quickstart
  megarl quickstart --model deepseek_v3 --steps 20 --output-dir runs/mine
"""
TAKES_OVERRIDES = False
MODELS = ("qwen3_moe", "qwen3", "deepseek_v3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="family of the tiny model (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of GRPO (default: those of the recipe)")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="where everything is written (default: runs/quickstart_MODEL)"
    )


def run(options: argparse.Namespace) -> int:
    """Run it; the report says where everything lies."""
    with phase("loading the program"):
        from megarl.quickstart.run import main

    return main(options)
