import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_ranks
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext.log_probs import LogProbs, log_probs_and_entropy


def reference(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> LogProbs:
    """The definition, in float64."""
    log_p = torch.log_softmax(logits[:, :vocab_size].double() / temperature, dim=-1)
    return LogProbs(
        log_p.gather(1, labels[:, None]).squeeze(1),
        -(log_p.exp() * log_p).sum(-1),
        logits[:, :vocab_size].argmax(-1) == labels,
    )


def random_case(tokens: int, columns: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels (half of them the greedy one) and a weight per token for log-probability and entropy."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(tokens, columns, generator=generator)
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[::2] = logits[::2, :vocab_size].argmax(-1)
    return logits, labels, *torch.randn(2, tokens, generator=generator).unbind()


def gradient(result: LogProbs, logits: Tensor, weights: Tensor, entropy_weights: Tensor) -> Tensor:
    loss = (result.log_probs * weights).sum() + (result.entropy * entropy_weights).sum()
    return torch.autograd.grad(loss, logits)[0]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    padding=st.integers(0, 8),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    chunk_tokens=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_the_definition(
    tokens, vocab_size, padding, temperature, chunk_tokens, seed
) -> None:
    logits, labels, weights, entropy_weights = random_case(tokens, vocab_size + padding, vocab_size, seed)
    logits.requires_grad_()
    result = log_probs_and_entropy(
        logits, labels, None, vocab_size=vocab_size, temperature=temperature, chunk_tokens=chunk_tokens
    )
    expected = reference(logits, labels, vocab_size, temperature)
    torch.testing.assert_close(result.log_probs.double(), expected.log_probs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(result.entropy.double(), expected.entropy, rtol=1e-6, atol=2e-6)
    assert torch.equal(result.greedy, expected.greedy)
    torch.testing.assert_close(
        gradient(result, logits, weights, entropy_weights),
        gradient(expected, logits, weights.double(), entropy_weights.double()),
        rtol=1e-5,
        atol=5e-6,
    )


def test_each_output_may_be_used_alone() -> None:
    logits, labels, weights, _ = random_case(5, 11, 11)
    logits.requires_grad_()
    for name in ("log_probs", "entropy"):
        actual = getattr(log_probs_and_entropy(logits, labels, None), name)
        expected = getattr(reference(logits, labels, 11, 1.0), name)
        torch.testing.assert_close(
            torch.autograd.grad((actual * weights).sum(), logits)[0],
            torch.autograd.grad((expected * weights).sum(), logits)[0],
            rtol=1e-5,
            atol=5e-6,
        )


def test_the_chunks_do_not_change_a_bit() -> None:
    logits, labels, weights, entropy_weights = random_case(37, 64, 64)
    logits.requires_grad_()
    whole = log_probs_and_entropy(logits, labels, None, chunk_tokens=64)
    cut = log_probs_and_entropy(logits, labels, None, chunk_tokens=5)
    assert torch.equal(whole.log_probs, cut.log_probs)
    assert torch.equal(whole.entropy, cut.entropy)
    assert torch.equal(
        gradient(whole, logits, weights, entropy_weights), gradient(cut, logits, weights, entropy_weights)
    )


def test_low_precision_logits_are_worked_on_in_fp32_and_left_as_they_were() -> None:
    logits, labels, weights, entropy_weights = random_case(8, 50, 50)
    low = logits.bfloat16().requires_grad_()
    before = low.detach().clone()
    result = log_probs_and_entropy(low, labels, None)
    exact = reference(low.float(), labels, 50, 1.0)
    assert result.log_probs.dtype == result.entropy.dtype == torch.float32
    torch.testing.assert_close(result.log_probs.double(), exact.log_probs, rtol=1e-6, atol=2e-6)
    high = before.float().requires_grad_()
    expected = gradient(log_probs_and_entropy(high, labels, None), high, weights, entropy_weights)
    assert torch.equal(gradient(result, low, weights, entropy_weights), expected.bfloat16())
    assert torch.equal(low, before)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-3e38, -3e38, -3e38]])
    result = log_probs_and_entropy(logits, torch.tensor([1, 0]), None)
    torch.testing.assert_close(result.log_probs, torch.tensor([-1e4, -1.0986123]))
    torch.testing.assert_close(result.entropy, torch.tensor([0.0, 1.0986123]))


def test_of_equal_logits_the_first_is_greedy() -> None:
    result = log_probs_and_entropy(torch.tensor([[0.0, 2.0, 2.0]] * 2), torch.tensor([1, 2]), None)
    assert result.greedy.tolist() == [True, False]


def test_a_label_in_the_padding_has_probability_zero() -> None:
    result = log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([3]), None, vocab_size=3)
    assert result.log_probs.tolist() == [float("-inf")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show(bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    result = log_probs_and_entropy(logits, torch.tensor([0, 0]), None)
    assert result.log_probs.isnan().tolist() == [False, True]
    assert result.entropy.isnan().tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([0]), None, temperature=temperature)


def test_forward_and_backward_hold_few_fp32_rows_at_a_time() -> None:
    logits = torch.randn(256, 1000).bfloat16().requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype in (torch.float32, torch.float64):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        result = log_probs_and_entropy(logits, torch.zeros(256, dtype=torch.long), None, chunk_tokens=16)
        gradient(result, logits, torch.ones(256), torch.ones(256))
    assert 0 < largest <= 16 * 1000 * 4


def cut_vocabulary(
    rank: int, sizes: ParallelSizes, columns: int, vocab_size: int, temperature: float
) -> tuple[LogProbs, Tensor]:
    """What one rank computes from its part of the logits: values, and the gradient of that part."""
    logits, labels, weights, entropy_weights = random_case(13, columns, vocab_size)
    shard = logits.chunk(sizes.tensor_model_parallel_size, dim=1)[rank].clone().requires_grad_()
    group = get_tensor_model_parallel_group()
    result = log_probs_and_entropy(shard, labels, group, vocab_size=vocab_size, temperature=temperature, chunk_tokens=4)
    values = LogProbs(result.log_probs.detach(), result.entropy.detach(), result.greedy)
    return values, gradient(result, shard, weights, entropy_weights)


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
    logits, labels, weights, entropy_weights = random_case(13, columns, vocab_size)
    logits.requires_grad_()
    expected = reference(logits, labels, vocab_size, 0.8)
    first = answers[0][0]
    for values, _ in answers:
        assert torch.equal(values.log_probs, first.log_probs)
        assert torch.equal(values.entropy, first.entropy)
        assert torch.equal(values.greedy, first.greedy)
    torch.testing.assert_close(first.log_probs.double(), expected.log_probs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(first.entropy.double(), expected.entropy, rtol=1e-6, atol=2e-6)
    assert torch.equal(first.greedy, expected.greedy)
    torch.testing.assert_close(
        torch.cat([gradient_of_shard for _, gradient_of_shard in answers], dim=1),
        gradient(expected, logits, weights.double(), entropy_weights.double()),
        rtol=1e-5,
        atol=5e-6,
    )
