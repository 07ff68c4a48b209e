import pytest
import torch

from megarl.data import Conversation
from megarl.stages.conversations import conversation_batch

CONVERSATIONS = [Conversation([5, 6, 7], [False, True, True]), Conversation([8, 9], [False, True])]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token_mean", [0, 1 / 3, 1 / 3, 0, 1 / 3]), ("seq_mean_token_mean", [0, 1 / 4, 1 / 4, 0, 1 / 2])],
)
def test_what_the_assistant_says_weighs_as_an_aggregation_has_it(aggregation: str, weights: list[float]) -> None:
    batch = conversation_batch(CONVERSATIONS, aggregation, unit=2)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (batch.lengths.tolist(), batch.unit) == ([3, 2], 2)
    torch.testing.assert_close(batch.fields["weights"], torch.tensor(weights, dtype=torch.float32))
