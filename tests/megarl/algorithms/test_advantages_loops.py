"""Every estimator against its formula in loops over float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_reference_advantages import LOOPS, Options, Response, gae_returns
from torch import Tensor

from megarl.algorithms import recurrence
from megarl.algorithms.advantages import ADVANTAGES, estimate
from megarl.algorithms.ragged import Ragged

TOKEN_FIELDS = (
    "token_rewards",
    "values",
    "old_log_probs",
    "probability_squares",
    "importance_weights",
    "process_rewards",
    "teacher_log_probs",
)
LENGTHS = st.one_of(st.integers(0, 5), st.sampled_from([15, 16, 17, 32, 64, 97]))
REWARDS = st.sampled_from([0.0, 0.1, 0.25, 1.0, 1.7])


@dataclass
class Case:
    inputs: dict[str, Any]
    loops: list[Response]


def cases(smallest_group: int) -> st.SearchStrategy[Case]:
    group = st.lists(st.tuples(LENGTHS, REWARDS), min_size=smallest_group, max_size=4)
    return st.builds(
        build,
        st.dictionaries(st.integers(-5, 1000), group, min_size=1, max_size=4).filter(
            lambda by_group: any(length for rows in by_group.values() for length, _ in rows)
        ),
        seed=st.integers(0, 2**31),
        with_token_rewards=st.booleans(),
    )


def build(by_group: dict[int, list[tuple[int, float]]], *, seed: int, with_token_rewards: bool) -> Case:
    """Responses in a random order, with random values at their tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(number, length, reward) for number, group in by_group.items() for length, reward in group]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    groups, lengths, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
    tokens, count = int(lengths.sum()), len(rows)
    normal, uniform = (torch.randn(9, tokens, generator=generator), torch.rand(9, tokens, generator=generator))
    inputs = {
        "responses": Ragged(lengths),
        "groups": groups,
        "rewards": rewards,
        "parts": {"format": torch.rand(count, generator=generator).round() / 2, "answer": rewards},
        "part_weights": {"format": 0.5},
        "baseline_rewards": torch.rand(count, generator=generator),
        "penalties": -torch.rand(count, generator=generator),
        # Quarters, so that scores which are equal on paper are so in every arithmetic; none below 0.
        "token_rewards": (uniform[0] * 4).floor() / 4 if with_token_rewards else None,
        "values": normal[1],
        # Below 1 / e, so that squared gradients are positive, and far from 0, as the token baseline's weights must be.
        "old_log_probs": -1 - uniform[2] * 2,
        "probability_squares": uniform[3],
        "importance_weights": uniform[4] + 0.5,
        "process_rewards": normal[5] / 10,
        "teacher_log_probs": -uniform[6] * 3,
    }
    return Case(inputs, as_loops(inputs))


def as_loops(inputs: Mapping[str, Any]) -> list[Response]:
    lengths = inputs["responses"].lengths.tolist()
    zeros = torch.zeros(inputs["responses"].tokens)
    columns = {name: inputs[name] for name in TOKEN_FIELDS}
    by_token = {name: (zeros if v is None else v).double().split(lengths) for name, v in columns.items()}
    return [
        Response(
            group=int(inputs["groups"][i]),
            reward=float(inputs["rewards"][i]),
            baseline_reward=float(inputs["baseline_rewards"][i]),
            parts={name: float(part[i]) for name, part in inputs["parts"].items()},
            penalty=float(inputs["penalties"][i]),
            **{name: values[i].tolist() for name, values in by_token.items()},
        )
        for i in range(len(lengths))
    ]


def flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def assert_equal_to_1e_6(actual: Tensor, expected: Tensor) -> None:
    """Relative to the largest value: where advantages cancel out, so do the digits of what they come from."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6 * max(1.0, float(expected.abs().max())))


def check(name: str, case: Case, options: Options) -> None:
    own = {option: getattr(options, option) for option in ADVANTAGES[name].options}
    advantages, returns = estimate(name, case.inputs, own)
    assert_equal_to_1e_6(advantages, flat(LOOPS[name](case.loops, options)))
    assert (returns is None) == (name != "gae")
    if returns is not None:
        assert_equal_to_1e_6(returns, flat(gae_returns(case.loops, options)))


def test_every_estimator_has_a_loop() -> None:
    assert set(LOOPS) == set(ADVANTAGES)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(st.data(), st.booleans(), st.sampled_from([0.0, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_the_formula(name: str, data: st.DataObject, normalize: bool, gamma: float, gae_lambda: float) -> None:
    case = data.draw(cases(ADVANTAGES[name].smallest_group))
    check(name, case, Options(normalize, gamma, gae_lambda, {"format": 0.5}))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_responses_of_thousands_of_tokens(name: str) -> None:
    by_group = {7: [(3000, 1.0), (1, 0.0), (2048, 0.25)], -2: [(0, 1.0), (777, 0.0)]}
    case = build(by_group, seed=3, with_token_rewards=True)
    check(name, case, Options(gamma=0.999, gae_lambda=0.95, part_weights={"format": 0.5}))


@pytest.mark.parametrize("with_token_rewards", [False, True])
@pytest.mark.parametrize("name", ["gae", "optimal_token_baseline", "prime", "reinforce_plus_plus", "remax"])
def test_many_pieces_of_tokens(name: str, with_token_rewards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "_PIECE", 3)
    by_group = {7: [(300, 1.0), (1, 0.0), (49, 0.25), (48, 1.7)], -2: [(0, 1.0), (144, 0.0), (200, 0.1)]}
    case = build(by_group, seed=5, with_token_rewards=with_token_rewards)
    check(name, case, Options(gamma=0.99, gae_lambda=0.95, part_weights={"format": 0.5}))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_of_one_token(name: str) -> None:
    case = build({0: [(1, 1.0), (0, 0.25)]}, seed=0, with_token_rewards=False)
    check(name, case, Options(part_weights={"format": 0.5}))


@pytest.mark.parametrize("name", [n for n, e in ADVANTAGES.items() if e.smallest_group > 1 and n != "prime"])
def test_equal_rewards_have_no_advantage_at_all(name: str) -> None:
    sizes = (2, 3, 7, 8, 64)
    groups = torch.tensor([size for size in sizes for _ in range(size)])
    rewards = groups / 10
    lengths = torch.arange(len(groups)) % 5
    inputs = {"responses": Ragged(lengths), "groups": groups, "rewards": rewards, "parts": {"only": rewards}}
    advantages = estimate(name, inputs)[0]
    assert advantages.tolist() == [0.0] * int(lengths.sum())
