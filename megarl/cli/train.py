"""Train a policy: rollouts by an inference engine, rewards, advantages, updates by Megatron-core.

Keys of the configuration are given as KEY=VALUE (Hydra overrides; all of them are in docs/configuration.md), options
of Megatron also as Megatron's own flags: `--tensor-model-parallel-size 8` is `megatron.tensor_model_parallel_size=8`.
"""

import argparse
from collections.abc import Iterator

from megarl.cli import recipe

EXAMPLES = """examples:
  megarl train --config-name grpo_qwen3_moe model.path=/models/Qwen3-30B-A3B data.train_files=[gsm8k.parquet]
  megarl train --config-name grpo_qwen3_moe loop.steps=200 --tensor-model-parallel-size 4 --sequence-parallel
  megarl train --config-name mine --config-dir ~/recipes reward.function=rewards.py:score --lr 1e-6
  megarl train --config-name quickstart model.path=runs/quickstart_qwen3_moe/model --print-config
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    recipe.add_arguments(parser, "train")


def run(options: argparse.Namespace) -> int:
    """Run the training loop to its last step."""
    return recipe.run(options, _parts)


def _parts() -> Iterator[recipe.Part]:
    from megarl.config.validate import validate

    yield validate
    from megarl.train import train

    yield train
