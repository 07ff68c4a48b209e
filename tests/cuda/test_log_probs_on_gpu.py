"""Log-probabilities without logits, on a GPU: values and gradients by the definition in float64."""

import pytest
import torch
from gpus import needs_gpus

from megatron_ext.log_probs import linear_log_probs

pytestmark = [pytest.mark.cuda, needs_gpus(1)]
TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 300, 128, 1000, 0.7


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("with_main_grad", [False, True], ids=["autograd", "Megatron's buffer"])
def test_log_probs_and_gradients_are_those_of_the_definition(dtype, tolerance, with_main_grad):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (0.2 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to("cuda", dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator).cuda()
    upstream = torch.randn(2, TOKENS, generator=generator).cuda()
    if with_main_grad:
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    found = linear_log_probs(hidden, weight, labels, None, temperature=TEMPERATURE, chunk_tokens=77)
    (found.log_probs * upstream[0] + found.entropy * upstream[1]).sum().backward()

    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    log_p = (exact_hidden @ exact_weight.T / TEMPERATURE).log_softmax(-1)
    log_probs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()

    torch.testing.assert_close(found.log_probs.double(), log_probs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.entropy.double(), entropy, atol=tolerance, rtol=tolerance)
    of_weight = weight.main_grad if with_main_grad else weight.grad
    for got, expected in ((hidden.grad, exact_hidden.grad), (of_weight, exact_weight.grad)):
        assert (got.double() - expected).norm() < tolerance * expected.norm()
