import statistics

import pytest
import torch
import verl_losses as verl
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_batches import random_batch, sequences
from torch import Tensor

from megarl.algorithms import Metrics, ValueObjective
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.metrics import Mean
from megarl.algorithms.value_loss import explained_variance
from megatron_ext.packing.packing import RaggedBatch, pack


def run(objective: ValueObjective, batch: RaggedBatch, values: Tensor, cut) -> tuple[Tensor, Tensor, Metrics]:
    values = values.clone().requires_grad_()
    total, pieces = torch.zeros((), dtype=torch.float64), []
    for members in cut:
        micro_batch = pack(batch, members, align=2)
        loss, metrics = objective(values[micro_batch.fields["place"]], micro_batch)
        loss.backward()
        total += loss.detach()
        pieces.append(metrics)
    assert values.grad is not None
    return total, values.grad, Metrics.merge(pieces)


@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "prompt_mean"])
@pytest.mark.parametrize("case_name", verl.NAMES)
def test_the_values_and_gradients_of_verl(case_name: str, aggregation: str) -> None:
    case = verl.case(case_name)
    # One more place before each row, as of a prompt: what comes first in a sequence is never predicted.
    mask = torch.cat([torch.zeros(24, 1, dtype=torch.bool), case.mask], 1).flatten()

    def placed(values: Tensor) -> Tensor:
        return torch.zeros(len(mask)).masked_scatter(mask, values)

    old = case.arrays["in/values"]
    batch = RaggedBatch(
        torch.zeros(len(mask), dtype=torch.long),
        torch.full((24,), 18),
        {
            "weights": placed(AGGREGATIONS[aggregation](case.ragged.lengths, options=verl.options_of(aggregation))),
            "old_values": placed(old),
            "returns": placed(old + case.arrays["in/token_level_rewards"]),
            "place": torch.arange(len(mask)),
        },
    )
    loss, gradient, metrics = run(ValueObjective(0.2), batch, placed(case.arrays["in/vpreds"]), [range(24)])
    assert float(loss) == pytest.approx(case.scalars[f"value/{aggregation}/loss"], rel=1e-6)
    assert metrics.values()["value/loss"] == pytest.approx(float(loss))
    clipped = case.scalars["value/clip_fraction"]
    assert metrics.values()["value/clip_fraction"] == pytest.approx(clipped, rel=1e-6)
    if f"value/{aggregation}/gradient" in case.arrays:
        verl.assert_equal(gradient[mask], case.arrays[f"value/{aggregation}/gradient"])
        assert not bool(gradient[~mask].any())


@settings(max_examples=25)
@given(sequences, st.integers(0, 100), st.none() | st.floats(0.05, 2), st.lists(st.integers(0, 3), min_size=7))
def test_value_gradient_and_metrics_token_by_token_for_every_cut(drawn, seed, clip, place) -> None:
    batch, values = random_batch(drawn, seed, "seq_mean_token_sum", spread=1.0)
    cut = [[index for index in range(len(batch)) if place[index] == number] for number in range(4)]
    loss, gradient, metrics = run(ValueObjective(clip), batch, values, cut)
    leaf, expected, clipped = values.clone().requires_grad_(), torch.zeros((), dtype=torch.float64), 0
    trained = (batch.fields["weights"] != 0).nonzero().squeeze(1).tolist()
    for i in trained:
        target, old = float(batch.fields["returns"][i]), float(batch.fields["old_values"][i])
        squared = (leaf[i] - target) ** 2
        if clip is not None:
            bounded = min(max(float(leaf[i]), old - clip), old + clip)
            if (bounded - target) ** 2 > float(squared):
                clipped += 1
                squared = 0 * leaf[i] + (bounded - target) ** 2
        expected = expected + float(batch.fields["weights"][i]) * squared / 2
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad)
    returns = [float(batch.fields["returns"][i]) for i in trained]
    errors = [float(batch.fields["returns"][i] - values[i]) for i in trained]
    spread = statistics.pvariance(returns)
    numbers = metrics.values()
    assert numbers["value/clip_fraction"] == pytest.approx(clipped / len(trained))
    assert numbers["value/mean"] == pytest.approx(statistics.mean(float(values[i]) for i in trained))
    assert numbers["value/return_mean"] == pytest.approx(statistics.mean(returns))
    if spread > 1e-9:
        explained = 1 - statistics.pvariance(errors) / spread
        assert numbers["value/explained_variance"] == pytest.approx(explained, rel=1e-6, abs=1e-6)


def test_a_perfect_critic_explains_everything_and_equal_returns_nothing() -> None:
    batch, _ = random_batch([(1, [True] * 5)], 0)
    batch = batch.with_fields(returns=torch.arange(6).double())
    _, _, metrics = run(ValueObjective(None), batch, torch.arange(6).double(), [[0]])
    assert metrics.values()["value/explained_variance"] == 1
    batch = batch.with_fields(returns=torch.ones(6).double())
    _, _, metrics = run(ValueObjective(None), batch, torch.arange(6).double(), [[0]])
    assert metrics.values()["value/explained_variance"] == 0


@pytest.mark.parametrize(("equal", "tokens"), [(-0.293428897857666, 71_944), (1.6933960914611816, 55_500)])
def test_what_float64_rounds_of_equal_returns_is_nothing_to_explain(equal: float, tokens: int) -> None:
    returns, errors = torch.full((tokens,), equal), 0.1 * torch.randn(tokens)
    squares = [values.double().square() for values in (errors, returns)]
    quantities = (errors, squares[0], returns, squares[1])
    pieces = [
        Mean.of(*each, formula=explained_variance) for each in zip(*(q.chunk(7) for q in quantities), strict=True)
    ]
    assert sum(pieces[1:], start=pieces[0]).value == 0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_what_is_explained_does_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    returns, error = scale * torch.tensor([1.0, 1.001], dtype=torch.float64), scale * torch.tensor([0.0, 0.0005])
    means = [values.double().mean() for values in (error, error.square(), returns, returns.square())]
    assert float(explained_variance(*means)) == pytest.approx(0.75, rel=1e-6)
    equal = torch.tensor([1.0, 1.0 + 1e-7], dtype=torch.float64)
    means[2:] = [(scale * equal).mean(), (scale * equal).square().mean()]
    assert float(explained_variance(*means)) == 0
