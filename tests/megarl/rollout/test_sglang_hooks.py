"""Hooks in SGLang's processes, on functions with the rules of SGLang's."""

from types import SimpleNamespace

import torch

from megarl.rollout.sglang.hooks import cut_by_top_k_first, keep_logits_in_float32, keep_one_mask_column


def sglang_cut(probs, top_ks, top_ps):
    """Shares of the tokens that SGLang samples from, by its lines: both cuts are of all tokens."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[torch.arange(ordered.shape[-1]).view(1, -1) >= top_ks.view(-1, 1)] = 0.0
    ordered[before > top_ps.view(-1, 1)] = 0.0
    return torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def test_top_p_is_a_share_of_what_top_k_keeps():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).repeat(4, 1)
    top_ks, top_ps = torch.tensor([2, 2, 1 << 30, 3], dtype=torch.int32), torch.tensor([0.5, 0.6, 0.65, 1.0])
    # The first alone is 0.57 of 0.4 and 0.3.
    expected = torch.tensor(
        [[0, 1, 0, 0], [0, 4 / 7, 3 / 7, 0], [0, 4 / 7, 3 / 7, 0], [0, 4 / 9, 3 / 9, 2 / 9]],
    )
    torch.testing.assert_close(cut_by_top_k_first(sglang_cut, probs, top_ks, top_ps), expected)
    assert sglang_cut(probs[:1], top_ks[:1], top_ps[:1])[0, 2] > 0
    assert probs.tolist() == torch.tensor([[0.1, 0.4, 0.3, 0.2]]).repeat(4, 1).tolist()


def test_tokens_as_likely_as_the_last_that_top_k_keeps_are_left_to_the_server():
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    found = cut_by_top_k_first(sglang_cut, probs, torch.tensor([2]), torch.tensor([1.0]))
    assert sorted(found[0].tolist()) == [0, 0, 0.5, 0.5]


def test_of_the_tokens_that_are_kept_one_is_told_of_and_log_probs_stay():
    told = SimpleNamespace(
        token_ids=torch.arange(6, dtype=torch.int32).view(2, 3),
        lengths=torch.tensor([3, 0], dtype=torch.int32),
        selected_logprobs=torch.tensor([-0.5, -0.25]),
    )
    keep_one_mask_column(told, object())
    assert told.token_ids.tolist() == [[0], [3]]
    assert told.token_ids.untyped_storage().nbytes() == 8
    assert told.lengths.tolist() == [1, 0]
    assert told.selected_logprobs.tolist() == [-0.5, -0.25]


def test_routers_tell_apart_what_half_precision_does_not():
    class Gate(torch.nn.Linear):
        """As SGLang's, which give a bias that is not added, too."""

        def forward(self, hidden):
            return super().forward(hidden), None

    gate = Gate(256, 64, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded, _ = gate(hidden)
    keep_logits_in_float32(None, SimpleNamespace(gate=gate), 0)
    logits, bias = gate(hidden)
    assert logits.dtype == torch.float32
    assert bias is None
    exact = (hidden.double() @ gate.weight.double().T).topk(4).indices
    torch.testing.assert_close(logits.topk(4).indices, exact)
    assert not torch.equal(rounded.topk(4).indices, exact)
