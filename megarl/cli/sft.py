"""Fine-tune a policy on conversations, by the same Megatron engine that `megarl train` uses.

Keys of the configuration are given as KEY=VALUE (those of the group `sft` are about the data and the length of the
run), options of Megatron also as Megatron's own flags.
"""

import argparse
from collections.abc import Iterator

from megarl.cli import recipe

EXAMPLES = """examples:
  megarl sft --config-name quickstart_sft model.path=model sft.train_files=[a.parquet] \\
      sft.stop_at_exact_match=null
  megarl sft --config-name quickstart_sft model.path=model sft.train_files=[a.parquet] \\
      sft.eval_files=[b.parquet] --lr 2e-5
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    recipe.add_arguments(parser, "sft")


def run(options: argparse.Namespace) -> int:
    """Run the fine-tuning to its last step."""
    return recipe.run(options, _parts)


def _parts() -> Iterator[recipe.Part]:
    from megarl.config.validate import validate_sft

    yield validate_sft
    from megarl.sft import sft

    yield sft
