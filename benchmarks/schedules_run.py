"""`megarl train` with response lengths from a table: the model never samples its end token, and is cut off there.

The table is heavy-tailed: a few responses of a step are many times longer than most.
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
    """Tokens of each response to a draw, determined by the draw alone."""
    drawn = np.random.default_rng((0, ordinal)).lognormal(np.log(MEDIAN_TOKENS), SIGMA)
    return int(np.clip(drawn, 1, longest))


def _of_the_table(
    config: MegarlConfig, stop_token_ids: tuple[int, ...], ordinals: Sequence[int]
) -> list[SamplingParameters]:
    usual = sampling_parameters(config, stop_token_ids, ordinals)
    return [
        # vLLM does not accept a stop token outside the vocabulary.
        replace(each, max_tokens=tokens_of(ordinal, each.max_tokens), stop_token_ids=())
        for each, ordinal in zip(usual, ordinals, strict=True)
    ]


if __name__ == "__main__":
    rollouts.sampling_parameters = _of_the_table
    sys.exit(main(sys.argv[1:]))
