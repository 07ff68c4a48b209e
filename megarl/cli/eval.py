"""Evaluate a model: a fresh engine loads a HuggingFace folder and answers held-out prompts.

By default each prompt gets one response, greedy unless --temperature is given, and the accuracy is the mean reward.
With --samples N, N responses per prompt are sampled. The accuracy is then their mean, and there are pass@k (one of k is
right), majority@k (what most of k answer) and best@k (the best of k). Other configuration keys are given as KEY=VALUE.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from converters.errors import UserError, names_as_given
from megarl.cli import recipe
from megarl.cli.evaluation_table import evaluation_table
from megarl.cli.model_folder import refuse_checkpoint
from megarl.process.phase import phase

EXAMPLES = """examples:
  megarl eval --model runs/quickstart_qwen3_moe/huggingface \\
      --files runs/quickstart_qwen3_moe/data/eval.parquet --max-response-tokens 8
  megarl eval --model Qwen3-30B-A3B --files gsm8k.parquet --reward gsm8k --max-response-tokens 1024 \\
      --samples 16 --temperature 0.6 rollout.engine_args.tensor_parallel_size=4
"""
TAKES_OVERRIDES = True
LOGS_HELP = "where the engine's log goes (default: runs/eval; runs/eval-2 while that is in use)"

_KEYS = {
    "--model": "model.path",
    "--reward": "reward.function",
    "--max-response-tokens": "rollout.max_response_tokens",
    "--samples": "loop.eval_samples",
    "--temperature": "loop.eval_temperature",
    "--output-dir": "output_dir",
}
"""Option -> the configuration key that it sets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "megarl eval --model DIR --files FILE [FILE ...] [options] [KEY=VALUE ...]"
    parser.add_argument("--model", required=True, metavar="DIR", help="HuggingFace folder")
    parser.add_argument("--files", required=True, nargs="+", metavar="FILE", help="parquet files of prompts")
    parser.add_argument("--reward", metavar="NAME", help="a built-in reward, or path/to/file.py:name")
    parser.add_argument("--max-response-tokens", type=int, metavar="N", help="longest response")
    parser.add_argument("--samples", type=int, metavar="N", help="responses to each prompt (default: 1)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of the responses (default: one response is greedy, several have 1)",
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        help=LOGS_HELP,
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as one line of JSON")


def overrides_of(options: argparse.Namespace) -> list[str]:
    """The command line as overrides of the recipe `eval`."""
    # Overrides that follow --files are parsed as its values; folders of data may be named split=test.
    overrides = [word for word in options.files if "=" in word and not Path(word).exists()]
    files = [word for word in options.files if word not in overrides]
    named = recipe.named_overrides(options, _KEYS)
    return [*named, recipe.override("data.eval_files", files), *overrides, *options.overrides]


def run(options: argparse.Namespace) -> int:
    """Print the model's accuracy."""
    with names_as_given({**{key: option for option, key in _KEYS.items()}, "data.eval_files": "--files"}):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from megarl.config.compose import compose
    from megarl.config.input_paths import check_input_paths

    recipe.refuse_flags(options)
    _check(options)
    refuse_checkpoint(Path(options.model))
    with phase("reading the configuration"):
        config = compose("eval", overrides_of(options))
        check_input_paths(config, "eval")
        from megarl.config.validate import validate

        validate(config, "eval")
        from megarl.evaluate import evaluate_model
    with recipe.folder_of_its_own(config, options) as folder:
        found = evaluate_model(replace(config, output_dir=str(folder)))
    metrics = {name.removeprefix("eval/"): value for name, value in found.items()}
    for line in [json_of(options.model, metrics)] if options.json else lines_of(metrics):
        print(line)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check numbers here, to name the option in the error; the configuration would name its key."""
    for name, number in (("--samples", options.samples), ("--max-response-tokens", options.max_response_tokens)):
        if number is not None and number < 1:
            raise UserError(f"{name} {number} is too small: it must be at least 1")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        raise UserError(f"--temperature {options.temperature:g} must be a number above 0")


def json_of(model: str, metrics: Mapping[str, float]) -> str:
    """All metrics as one line of JSON."""
    return json.dumps({"model": model, **metrics, "dropped": int(metrics["dropped"])})


def lines_of(metrics: Mapping[str, float]) -> list[str]:
    """The accuracy, followed by the table of all estimates."""
    dropped = int(metrics["dropped"])
    left_out = f" ({dropped} responses could not be scored)" if dropped else ""
    return [f"accuracy {metrics['accuracy']:.4f}{left_out}", *evaluation_table(metrics)]
