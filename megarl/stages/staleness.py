"""Age of the weights that sampled each token, for the losses and metrics that need it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megarl.cluster.trainer.batch import Batch
from megarl.data import PromptGroup, Turn, trajectories_of
from megarl.data.stretches import Array, RunLengthArray, Stretch, Values, distinct
from megarl.schema import MegarlConfig
from megarl.stages.fields import with_fields


def with_staleness(batch: Batch, groups: Sequence[PromptGroup], version: int, config: MegarlConfig) -> Batch:
    """Add the fields about staleness that the configuration needs; the trainer has the weights of `version`.

    `staleness`: with `ratio_to=interpolated`. `on_kept_kv`: if engines keep their KV cache over a refit. It is True at
    tokens of `version` in turns that older weights began: the engine attended to their keys and values there, and the
    trainer does not.
    """

    def staleness(versions: Array) -> Array:
        return (version - versions).astype(np.float32)

    def is_on_kept_kv(versions: Array) -> Array:
        return (versions == version) & (versions[:1] < version)

    turns = [each.turns for each in trajectories_of(groups)]
    fields: dict[str, list[Values]] = {}
    if config.algorithm.ratio_to == "interpolated":
        fields["staleness"] = [_of_turns(each, staleness, np.float32) for each in turns]
    if config.schedule.in_flight == "keep":
        fields["on_kept_kv"] = [_of_turns(each, is_on_kept_kv, np.bool_) for each in turns]
    return with_fields(batch, **fields)


def has_tokens_of(version: int, turns: Sequence[Turn]) -> bool:
    """Whether the weights of `version` sampled any token of the turns."""
    return any(bool((distinct(each.versions) == version).any()) for each in turns)


def is_of_version(version: int, turns: Sequence[Turn]) -> Values:
    """For each token of the turns, whether the weights of `version` sampled it."""
    return _of_turns(turns, lambda versions: versions == version, np.bool_)


def _of_turns(turns: Sequence[Turn], of_versions: Callable[[Array], Array], dtype: npt.DTypeLike) -> Values:
    """Apply `of_versions` to the versions of each turn's sampled tokens; 0 at prompt tokens."""
    return tuple(part for turn in turns for part in (_zeros(turn.prompt_ids, dtype), _sampled(turn, of_versions)))


def _zeros(tokens: Stretch, dtype: npt.DTypeLike) -> RunLengthArray:
    return RunLengthArray(np.zeros(1, dtype), np.array([len(tokens)], dtype=np.int32))


def _sampled(turn: Turn, of_versions: Callable[[Array], Array]) -> Stretch:
    versions = turn.versions
    if isinstance(versions, RunLengthArray):
        return RunLengthArray(of_versions(versions.values), versions.lengths)
    return of_versions(versions)
