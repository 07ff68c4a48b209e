"""Tokens whose keys and values are in part of older weights than those that sampled them."""

from collections.abc import Sequence

import numpy as np

from megarl.cluster.batch import Batch
from megarl.data import PromptGroup, Turn
from megarl.data.stretches import Runs, Stretch, Values, here
from megarl.stages.fields import with_fields


def with_kept_kv(batch: Batch, groups: Sequence[PromptGroup], version: int) -> Batch:
    """`batch` with the field `on_kept_kv`: tokens of `version` in turns that older weights began.

    The trainer has the weights of `version`, so that engine and trainer differ there by what was kept.
    """
    trajectories = [each for group in groups for each in group.trajectories]
    return with_fields(batch, on_kept_kv=[_of_turns(each.turns, version) for each in trajectories])


def _of_turns(turns: Sequence[Turn], version: int) -> Values:
    return tuple(part for turn in turns for part in (_nowhere(len(turn.prompt_ids)), _sampled(turn, version)))


def _nowhere(tokens: int) -> Runs:
    return Runs(np.array([False]), np.array([tokens], dtype=np.int32))


def _sampled(turn: Turn, version: int) -> Stretch:
    runs = turn.versions
    versions = runs.values if isinstance(runs, Runs) else here(runs)
    is_kept = (versions == version) & (versions[:1] < version)
    return Runs(is_kept, runs.lengths) if isinstance(runs, Runs) else is_kept
