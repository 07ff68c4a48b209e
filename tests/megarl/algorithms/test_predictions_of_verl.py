"""Inputs of losses and rewards: log-probs and entropies of logits, and the penalty of long responses."""

import pytest
import torch
import verl_losses as verl

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.stages.reward import overlong_penalty
from megatron_ext.log_probs import linear_log_probs

VOCABULARY = 31


def test_log_probs_and_entropies_of_logits_are_those_of_verl() -> None:
    case = verl.case("fully_masked")
    logits, ids = case.arrays["in/logits"].view(-1, VOCABULARY), case.arrays["in/ids"].long()
    with torch.no_grad():
        ours = linear_log_probs(logits, torch.eye(VOCABULARY), ids, None, chunk_tokens=100)
    verl.assert_equal(ours.log_probs, case.arrays["log_prob_of_logits"])
    verl.assert_equal(ours.entropy, case.arrays["entropy"])
    assert ours.probability_squares is not None
    verl.assert_equal(ours.probability_squares, case.arrays["sum_pi_squared"])
    mean = float((AGGREGATIONS["token_mean"](case.ragged.lengths) * ours.entropy).sum())
    assert mean == pytest.approx(case.scalars["entropy_loss"], rel=1e-6)


@pytest.mark.parametrize("case_name", verl.NAMES)
def test_the_penalties_of_long_responses_are_those_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    ours = [overlong_penalty(length, 17, 5, 1.0) for length in case.ragged.lengths.tolist()]
    verl.assert_equal(torch.tensor(ours), case.arrays["overlong"])
