"""The gap between engine and trainer by both routings, on a policy whose log-probs are written down."""

import numpy as np
import pytest

from megarl.cluster.trainer.batch import Batch, sequences_of
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


@pytest.mark.parametrize("responses", [1, 32, 33, 100])
def test_both_gaps_are_means_over_trained_tokens(responses: int) -> None:
    gaps = replay_gaps(batch_of(responses), Policy(), temperature=0.7)
    assert gaps == pytest.approx({"experts/gap_replayed": 0.25, "experts/gap_own_routing": 0.5}, abs=1e-4)


def test_where_nothing_is_replayed_nothing_is_computed() -> None:
    batch = batch_of(3)
    assert replay_gaps(batch.only(["trained", "rollout_log_probs"]), None, temperature=0.7) == {}
    untrained = with_fields(batch, trained=[(np.zeros(6, dtype=bool),)] * 3)
    assert replay_gaps(untrained, None, temperature=0.7) == {}
