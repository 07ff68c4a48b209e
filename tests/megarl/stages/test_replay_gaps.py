"""The gap between engine and trainer by both routings, on a policy whose log-probs are written down."""

import numpy as np
import pytest

from megarl.cluster.trainer.batch import Batch, sequences_of
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.stages.fields import with_fields
from megarl.stages.router_replay import replay_gaps


class Policy:
    """Its log-prob of a token is minus the token; by its own routing 0.5 less, at every second token."""

    def log_probs(self, batch, *, temperature, replay):
        assert temperature == 0.7
        ragged = batch.load()
        assert ragged.routed_experts is not None
        assert "trained" in ragged.fields
        values = -ragged.tokens.float()
        if not replay:
            values[::2] -= 0.5
        return sequences_of(values, batch.lengths)


def batch_of(responses: int) -> Batch:
    """Responses of 4 tokens behind a prompt of 2, which is not trained on; the engine says 0.25 more."""
    tokens = np.arange(6 * responses, dtype=np.int32).reshape(responses, 6)
    engine = (0.25 - tokens).astype(np.float32)
    engine[:, :2] = 0
    batch = Batch(np.full(responses, 6), [(each,) for each in tokens])
    return with_fields(
        batch,
        trained=[(np.array([False] * 2 + [True] * 4),)] * responses,
        rollout_log_probs=[(each,) for each in engine],
        routed_experts=[(np.zeros(6, dtype="V4"),)] * responses,
    )


def groups_of(versions: list[list[int]]) -> list[PromptGroup]:
    """Groups of one response each, of tokens of these versions, as those of `batch_of`."""
    prompt = Prompt(0, "any", [0, 1], "", {})
    turns = [Turn.of([0, 1], range(2, 6), [0.25] * 4, each, "stop") for each in versions]
    return [PromptGroup(prompt, ordinal, [Trajectory((turn,), "stop")]) for ordinal, turn in enumerate(turns)]


GAPS = pytest.approx({"experts/gap_replayed": 0.25, "experts/gap_own_routing": 0.5}, abs=1e-4)


@pytest.mark.parametrize("responses", [1, 32, 33, 100])
def test_both_gaps_are_means_over_trained_tokens(responses: int) -> None:
    groups = groups_of([[7] * 4] * responses)
    assert replay_gaps(batch_of(responses), groups, Policy(), version=7, temperature=0.7) == GAPS


@pytest.mark.parametrize("before", [0, 101])
def test_tokens_that_older_weights_sampled_are_left_out(before: int) -> None:
    versions = [*[[6] * 4] * before, [6, 6, 7, 7], [7] * 4, [5, 6, 6, 6]]
    is_older = np.array([[False, False, *(each < 7 for each in own)] for own in versions])
    batch = batch_of(len(versions))
    engine = batch.values("rollout_log_probs").numpy().reshape(-1, 6) + 9.0 * is_older
    batch = with_fields(batch, rollout_log_probs=[(each.astype(np.float32),) for each in engine])
    assert replay_gaps(batch, groups_of(versions), Policy(), version=7, temperature=0.7) == GAPS
    assert replay_gaps(batch, groups_of(versions), None, version=8, temperature=0.7) == {}


def test_where_nothing_is_replayed_nothing_is_computed() -> None:
    batch, groups = batch_of(3), groups_of([[7] * 4] * 3)
    unreplayed = batch.only(["trained", "rollout_log_probs"])
    assert replay_gaps(unreplayed, groups, None, version=7, temperature=0.7) == {}
    untrained = with_fields(batch, trained=[(np.zeros(6, dtype=bool),)] * 3)
    assert replay_gaps(untrained, groups, None, version=7, temperature=0.7) == {}
