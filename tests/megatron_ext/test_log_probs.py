from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_ranks
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext.log_probs import LogProbs, linear_log_probs

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
HIDDEN = 6


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, temperature: float, softcap: float | None = None
) -> LogProbs:
    """The definition, in float64."""
    logits = hidden.double() @ weight[:vocab_size].double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return LogProbs(
        log_p.gather(1, labels[:, None]).squeeze(1),
        -(log_p.exp() * log_p).sum(-1),
        logits.argmax(-1) == labels,
        log_p.exp().square().sum(-1),
    )


def random_case(tokens: int, columns: int, vocab_size: int, seed: int = 0) -> Case:
    """Hidden states, weight, labels (half of them the greedy one), a weight per token for log-prob and entropy."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(columns, HIDDEN, generator=generator)
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[::2] = (hidden @ weight[:vocab_size].T)[::2].argmax(-1)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, *torch.randn(2, tokens, generator=generator)


def gradients(result: LogProbs, case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight, of a loss with log-probabilities and entropy."""
    hidden, weight, _, of_log_probs, of_entropy = case
    loss = (result.log_probs * of_log_probs).sum() + (result.entropy * of_entropy).sum()
    hidden_gradient, weight_gradient = torch.autograd.grad(loss, (hidden, weight))
    return hidden_gradient, weight_gradient


def assert_close(actual: LogProbs, expected: LogProbs) -> None:
    torch.testing.assert_close(actual.log_probs.double(), expected.log_probs, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=4e-6)
    assert torch.equal(actual.greedy, expected.greedy)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 8),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    chunk_tokens=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_the_definition(
    tokens: int,
    vocab_size: int,
    padding: int,
    temperature: float,
    softcap: float | None,
    chunk_tokens: int,
    seed: int,
) -> None:
    case = random_case(tokens, vocab_size + padding, vocab_size, seed)
    hidden, weight, labels, *_ = case
    options = {"vocab_size": vocab_size, "temperature": temperature, "softcap": softcap, "chunk_tokens": chunk_tokens}
    result = linear_log_probs(hidden, weight, labels, None, **options)
    expected = reference(hidden, weight, labels, vocab_size, temperature, softcap)
    assert_close(result, expected)
    for actual, wanted in zip(gradients(result, case), gradients(expected, case), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=5e-5)
    with torch.no_grad():
        squares = linear_log_probs(hidden, weight, labels, None, **options).probability_squares
    torch.testing.assert_close(squares.double(), expected.probability_squares, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
def test_each_output_may_be_used_alone(name: str) -> None:
    hidden, weight, labels, of_tokens, _ = random_case(5, 11, 11)
    actual = getattr(linear_log_probs(hidden, weight, labels, None), name)
    expected = getattr(reference(hidden, weight, labels, 11, 1.0), name)
    for got, wanted in zip(
        torch.autograd.grad((actual * of_tokens).sum(), (hidden, weight)),
        torch.autograd.grad((expected * of_tokens).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen: int) -> None:
    case = random_case(7, 11, 11)
    expected = gradients(linear_log_probs(*case[:3], None), case)[1 - frozen]
    case[frozen].requires_grad_(False)
    result = linear_log_probs(*case[:3], None)
    loss = (result.log_probs * case[3]).sum() + (result.entropy * case[4]).sum()
    loss.backward()
    assert case[frozen].grad is None
    assert torch.equal(case[1 - frozen].grad, expected)


def test_the_chunks_change_nothing_beyond_rounding() -> None:
    case = random_case(37, 64, 64)
    whole = linear_log_probs(*case[:3], None, chunk_tokens=64)
    cut = linear_log_probs(*case[:3], None, chunk_tokens=5)
    torch.testing.assert_close(whole.log_probs, cut.log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.entropy, cut.entropy, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients(whole, case), gradients(cut, case), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


def test_squares_are_computed_where_no_gradient_is_recorded_alone() -> None:
    hidden, weight, labels, *_ = random_case(3, 5, 5)
    assert linear_log_probs(hidden, weight, labels, None).probability_squares is None
    assert linear_log_probs(hidden.detach(), weight.detach(), labels, None).probability_squares is not None


def test_logits_in_fp32_round_nothing_and_gradients_keep_their_type() -> None:
    hidden, weight, labels, of_log_probs, of_entropy = random_case(8, 50, 50)
    low = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    high = [each.detach().float().requires_grad_() for each in low]
    result = linear_log_probs(*low, labels, None, fp32_logits=True, chunk_tokens=3)
    exact = linear_log_probs(*high, labels, None)
    torch.testing.assert_close(result.log_probs, exact.log_probs, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(linear_log_probs(*low, labels, None).log_probs, exact.log_probs, rtol=1e-4, atol=1e-4)
    got = gradients(result, (*low, labels, of_log_probs, of_entropy))
    wanted = gradients(exact, (*high, labels, of_log_probs, of_entropy))
    assert [gradient.dtype for gradient in got] == [torch.bfloat16] * 2
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)


def test_low_precision_logits_are_those_of_an_output_layer_and_worked_on_in_fp32() -> None:
    """bfloat16: the logits are rounded as a matrix product in that type is; the rest is fp32 until the gradients."""
    hidden, weight, labels, of_log_probs, of_entropy = random_case(8, 50, 50)
    low = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    logits = (low[0] @ low[1].T).detach().float()
    as_is = logits, torch.eye(50)
    result = linear_log_probs(*low, labels, None)
    exact = linear_log_probs(*as_is, labels, None)
    assert torch.equal(result.log_probs, exact.log_probs)
    assert torch.equal(result.entropy, exact.entropy)
    got = gradients(result, (*low, labels, of_log_probs, of_entropy))
    assert [gradient.dtype for gradient in got] == [torch.bfloat16] * 2
    plain = logits.clone().requires_grad_()
    wanted = reference(plain, torch.eye(50), labels, 50, 1.0)
    loss = (wanted.log_probs * of_log_probs).sum() + (wanted.entropy * of_entropy).sum()
    (of_logits,) = torch.autograd.grad(loss, plain)
    torch.testing.assert_close(got[0].float(), of_logits @ low[1].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1].float(), of_logits.T @ low[0].float(), rtol=2e-2, atol=2e-2)


def test_the_weight_gradient_of_many_chunks_is_summed_in_fp32() -> None:
    tokens = 2048
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    result = linear_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.long), None, chunk_tokens=1)
    result.log_probs.sum().backward()
    # Summed in bfloat16 it would stay at 128, from where on adding 0.5 changes nothing.
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


def test_products_of_the_weight_gradient_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 64, generator=generator).bfloat16()
    labels = torch.randint(96, (256,), generator=generator)
    found = []
    for chunk_tokens in (256, 4):
        # All logits are equal, so that they and their gradients are the same numbers however they are cut.
        weight = torch.zeros(96, 64, dtype=torch.bfloat16, requires_grad=True)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        linear_log_probs(hidden, weight, labels, None, chunk_tokens=chunk_tokens).log_probs.sum().backward()
        found.append(weight.main_grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_goes_into_megatrons_buffer_and_autograd_gets_zeros(dtype: torch.dtype) -> None:
    hidden, weight, labels, of_log_probs, _ = random_case(9, 12, 10)
    hidden, weight = (each.detach().to(dtype).requires_grad_() for each in (hidden, weight))

    def backward() -> None:
        result = linear_log_probs(hidden, weight, labels, None, vocab_size=10, chunk_tokens=4)
        (result.log_probs * of_log_probs).sum().backward()

    backward()
    expected, weight.grad = weight.grad.float(), None
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    backward()
    backward()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(weight.main_grad, 1 + 2 * expected, rtol=tolerance, atol=2 * tolerance)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e38, -3e38, -3e38]])
    result = linear_log_probs(logits, torch.eye(3), torch.tensor([1, 0]), None)
    torch.testing.assert_close(result.log_probs, torch.tensor([-1e4, -1.0986123]))
    torch.testing.assert_close(result.entropy, torch.tensor([0.0, 1.0986123]))


def test_of_equal_logits_the_first_is_greedy() -> None:
    result = linear_log_probs(torch.tensor([[0.0, 2.0, 2.0]] * 2), torch.eye(3), torch.tensor([1, 2]), None)
    assert result.greedy.tolist() == [True, False]


def test_a_label_in_the_padding_has_probability_zero() -> None:
    result = linear_log_probs(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]), None, vocab_size=3)
    assert result.log_probs.tolist() == [float("-inf")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_hidden_states_that_are_not_finite_show(bad: float) -> None:
    hidden = torch.zeros(2, 4)
    hidden[1, 2] = bad
    result = linear_log_probs(hidden, torch.ones(3, 4), torch.tensor([0, 0]), None)
    assert result.log_probs.isnan().tolist() == [False, True]
    assert result.entropy.isnan().tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        linear_log_probs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([0]), None, temperature=temperature)


@contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """Inside, the bytes of the largest tensor that an operation gave."""
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest[0] = max(largest[0], result.untyped_storage().nbytes())
            return result

    with Watch():
        yield largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_those_of_a_chunk_exist(dtype: torch.dtype) -> None:
    tokens, columns, width = 256, 1000, 4
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(columns, width).to(dtype).requires_grad_()
    with largest_tensor() as largest:
        result = linear_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.long), None, chunk_tokens=16)
        (result.log_probs + result.entropy).sum().backward()
    assert largest == [16 * columns * 4]


def test_the_chunk_follows_from_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.log_probs.CHUNK_LOGITS", 3000)
    hidden, weight = torch.randn(100, 2), torch.randn(1000, 2)
    with largest_tensor() as largest:
        linear_log_probs(hidden, weight, torch.zeros(100, dtype=torch.long), None)
    assert largest == [3 * 1000 * 4]


def cut_vocabulary(
    rank: int, sizes: ParallelSizes, columns: int, vocab_size: int, temperature: float
) -> tuple[LogProbs, tuple[Tensor, Tensor]]:
    """Results of one rank with its part of the weight: values, its part of the hidden states' gradient, the
    gradient of its weight.
    """
    hidden, weight, labels, *of_tokens = random_case(13, columns, vocab_size)
    shard = weight.detach().chunk(sizes.tensor_model_parallel_size)[rank].clone().requires_grad_()
    group, options = get_tensor_model_parallel_group(), {"vocab_size": vocab_size, "temperature": temperature}
    result = linear_log_probs(hidden, shard, labels, group, **options, softcap=5.0, chunk_tokens=4)
    with torch.no_grad():
        squares = linear_log_probs(hidden, shard, labels, group, **options, softcap=5.0).probability_squares
    values = LogProbs(result.log_probs.detach(), result.entropy.detach(), result.greedy, squares)
    return values, gradients(result, (hidden, shard, labels, *of_tokens))


@pytest.mark.parametrize(
    ("ranks", "columns", "vocab_size"),
    [
        (2, 64, 64),
        (2, 64, 50),  # padding on the last rank
        (2, 64, 20),  # the last rank has padding alone
        (3, 24, 9),  # one rank whole, one in part, one none
    ],
)
def test_a_cut_vocabulary_gives_the_values_and_gradients_of_the_whole(
    ranks: int, columns: int, vocab_size: int
) -> None:
    sizes = ParallelSizes(world_size=ranks, tensor_model_parallel_size=ranks)
    answers = run_ranks(cut_vocabulary, sizes, columns, vocab_size, 0.8)
    case = random_case(13, columns, vocab_size)
    expected = reference(*case[:3], vocab_size, 0.8, 5.0)
    first = answers[0][0]
    for values, _ in answers:
        assert torch.equal(values.log_probs, first.log_probs)
        assert torch.equal(values.entropy, first.entropy)
        assert torch.equal(values.greedy, first.greedy)
        assert torch.equal(values.probability_squares, first.probability_squares)
    assert_close(first, expected)
    torch.testing.assert_close(first.probability_squares.double(), expected.probability_squares, rtol=2e-6, atol=1e-7)
    of_hidden, of_weight = gradients(expected, case)
    parts = [gradient for _, gradient in answers]
    torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(0), of_hidden, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), of_weight, rtol=1e-5, atol=2e-5)
