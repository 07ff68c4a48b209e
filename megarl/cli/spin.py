"""Fine-tune a policy by self-play (SPIN): it learns to prefer the replies in the data to those of its earlier self.

Keys of the configuration are given as KEY=VALUE (those of the group `preference` are about the data and the length of
the run), options of Megatron also as Megatron's own flags.
"""

import argparse
from collections.abc import Iterator

from megarl.cli import recipe

EXAMPLES = """examples:
  megarl spin --config-name quickstart_spin model.path=model preference.train_files=[a.parquet] output_dir=runs/spin
  megarl spin --config-name quickstart_spin model.path=model preference.train_files=[a.parquet] \\
      preference.eval_files=[b.parquet] preference.steps_per_generation=20 --lr 1e-6
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    recipe.add_arguments(parser, "spin")


def run(options: argparse.Namespace) -> int:
    """Run the self-play to its last step."""
    return recipe.run(options, _parts)


def _parts() -> Iterator[recipe.Part]:
    from megarl.config.validate_preference import validate_preference

    yield validate_preference
    from megarl.spin import spin

    yield spin
