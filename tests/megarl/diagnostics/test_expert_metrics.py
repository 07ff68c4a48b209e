"""How evenly tokens are spread over experts, by hand."""

import torch
from known_metrics import is_known

from megarl.diagnostics import expert_metrics, replay_metrics
from megarl.tracking import Histogram


def test_load_and_imbalance_by_hand() -> None:
    metrics = expert_metrics(torch.tensor([[0, 0, 0, 0], [6, 2, 0, 0], [2, 2, 2, 2]]))
    assert metrics == {
        "experts/imbalance_mean": 2.0,
        "experts/imbalance_max": 3.0,
        "experts/idle_fraction": 0.25,
        "experts/imbalance/layer_1": 3.0,
        "experts/imbalance/layer_2": 1.0,
        "experts/load/layer_1": Histogram((-0.5, 0.5, 1.5, 2.5, 3.5), (6, 2, 0, 0)),
        "experts/load/layer_2": Histogram((-0.5, 0.5, 1.5, 2.5, 3.5), (2, 2, 2, 2)),
    }
    assert all(map(is_known, metrics))


def test_without_experts_there_is_nothing_to_say() -> None:
    assert expert_metrics(torch.zeros(3, 4, dtype=torch.int64)) == {}


def test_replayed_choices_and_the_tokens_that_have_one_that_was_changed() -> None:
    # Four tokens in three layers: one was changed in two of them, one in one.
    shares = {"experts/changed_by_replay": 0.25, "experts/tokens_changed_by_replay": 0.5}
    assert replay_metrics(torch.tensor([12, 3, 4, 2])) == shares
    assert replay_metrics(torch.zeros(4, dtype=torch.int64)) == {}
