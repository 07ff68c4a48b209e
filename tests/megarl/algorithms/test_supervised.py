import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import Metrics, SftObjective, exact_matches
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import RaggedBatch, pack


def test_the_loss_is_the_weighted_negative_log_likelihood() -> None:
    log_probs = torch.tensor([float("nan"), -1.0, -3.0, -0.5, float("nan")], requires_grad=True)
    predictions = LogProbs(log_probs, torch.zeros(5), torch.tensor([True, True, False, True, True]))
    weights = torch.tensor([0.0, 0.0, 0.25, 0.25, 0.5])
    batch = RaggedBatch(torch.arange(5), torch.tensor([5]), {"weights": weights})
    loss, metrics = SftObjective()(predictions, pack(batch, [0]))
    loss.backward()
    assert loss.item() == 1.25
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, -0.25, -0.25, -0.5, 0.0]
    assert metrics == Metrics({"sft/loss": torch.tensor(1.25), "sft/token_accuracy": torch.tensor(0.75)})


def test_it_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(SftObjective())) == SftObjective()


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4), max_size=6))
def test_a_sequence_matches_if_all_its_response_tokens_are_greedy(sequences) -> None:
    flat = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.bool).view(-1, 2)
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
    expected = [all(greedy for greedy, response in sequence if response) for sequence in sequences]
    assert exact_matches(flat[:, 0], flat[:, 1], lengths).tolist() == expected
