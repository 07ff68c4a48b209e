"""`megarl train` with the length of each response from a table: a model whose end token never comes is cut there.

The table is that of a heavy tail: a few responses of a step are many times as long as most.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.cli.main import main
from megarl.rollout.protocol import SamplingParameters
from megarl.run import rollouts
from megarl.schema import MegarlConfig
from megarl.stages.rollout import sampling_parameters

MEDIAN_TOKENS, SIGMA = 16, 1.3


def tokens_of(ordinal: int, longest: int) -> int:
    """Tokens of each response to a draw, which follow from the draw alone."""
    drawn = np.random.default_rng((0, ordinal)).lognormal(np.log(MEDIAN_TOKENS), SIGMA)
    return int(np.clip(drawn, 1, longest))


def _of_the_table(
    config: MegarlConfig, stop_token_ids: tuple[int, ...], ordinals: Sequence[int]
) -> list[SamplingParameters]:
    usual = sampling_parameters(config, stop_token_ids, ordinals)
    return [
        # vLLM takes no token to stop at that is beyond the vocabulary.
        replace(each, max_tokens=tokens_of(ordinal, each.max_tokens), stop_token_ids=())
        for each, ordinal in zip(usual, ordinals, strict=True)
    ]


if __name__ == "__main__":
    rollouts.sampling_parameters = _of_the_table
    sys.exit(main(sys.argv[1:]))
