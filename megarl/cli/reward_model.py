"""Train a reward model: the model's layers with a head that gives the better of two replies the higher score.

Keys of the configuration are given as KEY=VALUE (those of the group `preference` are about the data and the length of
the run), options of Megatron also as Megatron's own flags.
"""

import argparse
from collections.abc import Iterator

from megarl.cli import recipe

EXAMPLES = """examples:
  megarl reward-model --config-name quickstart_reward_model model.path=model \\
      preference.train_files=[a.parquet] output_dir=runs/reward_model
  megarl reward-model --config-name quickstart_reward_model model.path=model \\
      preference.train_files=[a.parquet] preference.eval_files=[b.parquet] --lr 1e-5
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    recipe.add_arguments(parser, "reward-model")


def run(options: argparse.Namespace) -> int:
    """Run the training to its last step."""
    return recipe.run(options, _parts)


def _parts() -> Iterator[recipe.Part]:
    from megarl.config.validate_preference import validate_preference

    yield validate_preference
    from megarl.reward_model import train_reward_model

    yield train_reward_model
