import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.aggregation import AGGREGATIONS

some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def prompt_means(lengths: list[int], groups: list[int]) -> list[float]:
    tokens = {group: sum(n for n, g in zip(lengths, groups, strict=True) if g == group) for group in groups}
    prompts = sum(1 for total in tokens.values() if total)
    return [1 / prompts / tokens[group] for length, group in zip(lengths, groups, strict=True) for _ in range(length)]


def one_by_one(name: str, lengths: list[int], constant: int, groups: list[int]) -> list[float]:
    if name == "prompt_mean":
        return prompt_means(lengths, groups)
    responses = sum(1 for length in lengths if length)
    weight = {
        "token_mean": lambda length: 1 / sum(lengths),
        "token_sum": lambda length: 1.0,
        "seq_mean_token_sum": lambda length: 1 / responses,
        "seq_mean_token_mean": lambda length: 1 / responses / length,
        "seq_mean_token_sum_norm": lambda length: 1 / responses / constant,
    }[name]
    return [weight(length) for length in lengths for _ in range(length)]


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(some_lengths, st.integers(1, 50), st.integers(1, 5))
def test_the_weight_of_every_token(name: str, lengths: list[int], constant: int, prompts: int) -> None:
    groups = [7 * (place % prompts) for place in range(len(lengths))]
    inputs = torch.tensor(lengths), torch.tensor(groups), verl.options_of(name, constant)
    weights = AGGREGATIONS[name](*inputs)
    assert weights.dtype == torch.float32
    assert not AGGREGATIONS[name].of_responses(*inputs)[inputs[0] == 0].any()
    assert weights.tolist() == pytest.approx(one_by_one(name, lengths, constant, groups), rel=1e-6)


def test_a_prompt_of_long_responses_counts_as_one_of_short_ones() -> None:
    lengths, groups = torch.tensor([1, 1, 6, 2, 0, 0]), torch.tensor([3, 3, 0, 0, 5, 5])
    of_prompts = [float(part.sum()) for part in AGGREGATIONS["prompt_mean"](lengths, groups).split([2, 8])]
    assert of_prompts == pytest.approx([0.5, 0.5])
    of_prompts = [float(part.sum()) for part in AGGREGATIONS["token_mean"](lengths).split([2, 8])]
    assert of_prompts == pytest.approx([0.2, 0.8])


def losses_of_verl(case: verl.Case) -> Tensor:
    """Losses [T] of which verl's fifteen numbers are those of its matrix, which is not known.

    They are all multiples of two sums, that of the tokens and that of the responses' means. So any losses with these
    two will do: here a + b / length.
    """
    lengths = case.ragged.lengths.double()
    present = lengths[lengths > 0]
    sums = torch.tensor([[float(lengths.sum()), len(present)], [1.0, float((1 / present).mean())]]).double()
    known = [case.scalars[f"aggregation/{name}/local"] for name in ("token_sum", "seq_mean_token_mean")]
    a, b = torch.linalg.solve(sums, torch.tensor(known).double())
    return (a + b / case.ragged.spread(lengths)).float()


@pytest.mark.parametrize("name", [name for name in AGGREGATIONS if name != "prompt_mean"])
@pytest.mark.parametrize("case_name", verl.NAMES)
def test_the_values_of_verl_on_one_rank_and_on_one_of_four(case_name: str, name: str) -> None:
    case = verl.case(case_name)
    losses, lengths = losses_of_verl(case), case.ragged.lengths
    # verl multiplies by the number of ranks, over which its gradients are then averaged; ours are summed.
    for how, ranks, step, constant in (
        ("local", 1, lengths, verl.COLUMNS),
        ("global", verl.RANKS, verl.lengths_of_step(lengths), verl.COLUMNS),
        ("scale", 1, lengths, 123),
    ):
        weights = AGGREGATIONS[name](step, options=verl.options_of(name, constant))[: len(losses)]
        terms = ranks * weights * losses
        error = abs(float(terms.double().sum()) - case.scalars[f"aggregation/{name}/{how}"])
        assert error <= 1e-6 * float(terms.abs().sum()), how


@pytest.mark.parametrize("name", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_means_sum_to_one_for_thousands_of_responses(name: str) -> None:
    lengths = torch.randint(0, 300, (4000,), generator=torch.Generator().manual_seed(0))
    weights = AGGREGATIONS[name](lengths)
    assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_no_token_at_all_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no response of this step has a token"):
        AGGREGATIONS[name](torch.tensor([0, 0]), torch.tensor([0, 0]), verl.options_of(name))


@pytest.mark.parametrize("constant", [None, 0, -3])
def test_the_constant_length_has_to_be_given(constant: int | None) -> None:
    with pytest.raises(UserError, match=r"aggregation_options.length is (None|0|-3): set it to at least 1"):
        AGGREGATIONS["seq_mean_token_sum_norm"](torch.tensor([2]), options={"length": constant})
