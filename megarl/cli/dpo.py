"""Train a policy to prefer the better of two replies (DPO); the weights it begins with are the reference.

Keys of the configuration are given as KEY=VALUE (those of the group `preference` are about the data and the length of
the run), options of Megatron also as Megatron's own flags.
"""

import argparse
from collections.abc import Iterator

from megarl.cli import recipe

EXAMPLES = """examples:
  megarl dpo --config-name quickstart_dpo model.path=model preference.train_files=[a.parquet] output_dir=runs/dpo
  megarl dpo --config-name quickstart_dpo model.path=model preference.train_files=[a.parquet] \\
      preference.eval_files=[b.parquet] preference.beta=0.05 --lr 5e-7
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    recipe.add_arguments(parser, "dpo")


def run(options: argparse.Namespace) -> int:
    """Run the training to its last step."""
    return recipe.run(options, _parts)


def _parts() -> Iterator[recipe.Part]:
    from megarl.config.validate_preference import validate_preference

    yield validate_preference
    from megarl.dpo import dpo

    yield dpo
