import math

import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import Metrics
from megarl.algorithms.off_policy import off_policy_metrics
from megarl.algorithms.ragged import Ragged

OF_VERL = {
    "kl": "off_policy/kl",
    "k3_kl": "off_policy/k3",
    "chi2_token": "off_policy/chi2_token",
    "chi2_seq": "off_policy/chi2_response",
    "training_ppl": "off_policy/perplexity",
    "rollout_ppl": "off_policy/rollout_perplexity",
    "ppl_ratio": "off_policy/perplexity_ratio",
}
# verl averages over rows without a token too, as if their log-probs were 0 (see test below).
OVER_RESPONSES = ("chi2_seq", "training_ppl", "rollout_ppl", "ppl_ratio")


@pytest.mark.parametrize("case_name", verl.EVERY)
@pytest.mark.parametrize("name", OF_VERL)
def test_the_values_of_verl(name: str, case_name: str) -> None:
    case = verl.case(case_name)
    present = float((case.ragged.lengths > 0).float().mean())
    log_probs, rollout = case.arrays["in/old_log_prob"], case.arrays["in/rollout_log_prob"]
    actual = off_policy_metrics(log_probs, rollout, case.ragged).values()[OF_VERL[name]]
    expected = case.scalars[f"off_policy/{name}"]
    if name in OVER_RESPONSES:
        empty = 0.0 if name == "chi2_seq" else 1.0
        expected = (expected - empty * (1 - present)) / present
    # Differences of nearly equal numbers in verl's float32: to 1e-6 of the numbers.
    assert actual == pytest.approx(expected, rel=1e-6, abs=5e-7)


@pytest.mark.parametrize("case_name", verl.EVERY)
def test_the_largest_difference_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    log_probs, rollout = case.arrays["in/old_log_prob"], case.arrays["in/rollout_log_prob"]
    actual = off_policy_metrics(log_probs, rollout, case.ragged).values()["off_policy/log_perplexity_difference_max"]
    expected = max(case.scalars["off_policy/log_ppl_diff_max"], -case.scalars["off_policy/log_ppl_diff_min"])
    assert actual == pytest.approx(expected, abs=1e-6)


rows = st.lists(st.lists(st.tuples(st.floats(-5, 0), st.floats(-1, 1)), max_size=6), min_size=1, max_size=6)


@given(rows.filter(any))
def test_the_definitions_and_that_pieces_add_up(drawn) -> None:
    def metrics_of(part) -> Metrics:
        flat = torch.tensor([t for row in part for t in row], dtype=torch.float64).view(-1, 2)
        ragged = Ragged(torch.tensor([len(row) for row in part]))
        return off_policy_metrics(flat[:, 0], flat[:, 0] - flat[:, 1], ragged)

    values = Metrics.merge([metrics_of([row]) for row in drawn]).values()
    differences = [d for row in drawn for _, d in row]
    weights = [math.exp(d) for d in differences]
    present = [row for row in drawn if row]
    means = [sum(d for _, d in row) / len(row) for row in present]
    count = len(differences)
    expected = {
        "kl": -sum(differences) / count,
        "k3": sum(math.exp(d) - 1 - d for d in differences) / count,
        "chi2_token": sum(w * w for w in weights) / count - 1,
        "chi2_response": sum(math.exp(2 * sum(d for _, d in row)) for row in present) / len(present) - 1,
        "effective_sample_size": sum(weights) ** 2 / (count * sum(w * w for w in weights)),
        "perplexity": sum(math.exp(-sum(p for p, _ in row) / len(row)) for row in present) / len(present),
        "rollout_perplexity": sum(math.exp(-sum(p - d for p, d in row) / len(row)) for row in present) / len(present),
        "perplexity_ratio": sum(math.exp(-mean) for mean in means) / len(means),
        "log_perplexity_difference_max": max(abs(mean) for mean in means),
    }
    assert values.keys() == {f"off_policy/{name}" for name in expected}
    for name, value in expected.items():
        assert values[f"off_policy/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name
