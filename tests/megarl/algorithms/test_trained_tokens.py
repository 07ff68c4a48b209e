"""A prediction that is no number stops the step, by the name of its response."""

import pytest
import torch

from converters.errors import UserError
from megarl.algorithms import PolicyObjective, ValueObjective
from megarl.algorithms.ragged import Ragged
from megarl.algorithms.trained_tokens import check_tokens_finite
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack

OBJECTIVES = {
    "policy": (PolicyObjective(), lambda values: LogProbs(values, torch.zeros_like(values), values > 0)),
    "critic": (ValueObjective(), lambda values: values),
}


def micro_batch(**names: list[int]) -> MicroBatch:
    """Two sequences of a prompt of two tokens and a response of two."""
    weights = torch.tensor([0.0, 0.0, 0.25, 0.25] * 2)
    constant = dict.fromkeys(("advantages", "rollout_log_probs", "returns", "old_values"), torch.zeros(8))
    numbers = {name: torch.tensor(values) for name, values in names.items()}
    whole = RaggedBatch(torch.arange(8), torch.tensor([4, 4]), {"weights": weights, **constant}, names=numbers)
    return pack(whole, [1, 0], align=3)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("model", OBJECTIVES)
def test_it_is_named_by_response_and_prompt(model: str, bad: float) -> None:
    objective, predictions = OBJECTIVES[model]
    values = torch.zeros(8)
    values[2] = bad  # predicts the last token of the sequence that is packed first
    message = f"^the {model}'s .* of a token of response 9 to prompt 70 of this step is {bad}, not a finite number"
    with pytest.raises(UserError, match=message):
        objective(predictions(values), micro_batch(response=[5, 9], prompt=[60, 70]))
    with pytest.raises(UserError, match=f"of a token of a response of this step is {bad}"):
        objective(predictions(values), micro_batch())


@pytest.mark.parametrize("model", OBJECTIVES)
def test_on_a_prompt_it_does_not_count(model: str) -> None:
    objective, predictions = OBJECTIVES[model]
    values = torch.zeros(8)
    values[[0, 3, 4, 7]] = float("nan")
    loss, _ = objective(predictions(values), micro_batch())
    assert loss.isfinite()


def test_any_response_of_many_is_named() -> None:
    names = {"response": torch.tensor([4, 5, 6, 7])}
    for place, response in enumerate([4, 4, 6, 7]):
        values = torch.zeros(4)
        values[place] = torch.inf
        with pytest.raises(UserError, match=f"of a token of response {response} of this step is inf"):
            check_tokens_finite("log-prob", values, Ragged(torch.tensor([2, 0, 1, 1])), names)
