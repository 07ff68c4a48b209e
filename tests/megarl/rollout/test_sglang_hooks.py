"""Hooks in SGLang's processes, on functions with the rules of SGLang's."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rollout.sglang.hooks import (
    cut_by_top_k_first,
    draw_by_seed,
    find_cuda_runtime,
    keep_logits_in_float32,
    keep_one_mask_column,
)

ALL = 1 << 30
"""SGLang's `top_k` of a sample from all tokens."""


def sglang_cut(probs, top_ks, top_ps):
    """Shares of the tokens that SGLang samples from, by its lines: both cuts are of all tokens."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[torch.arange(ordered.shape[-1]).view(1, -1) >= top_ks.view(-1, 1)] = 0.0
    ordered[before > top_ps.view(-1, 1)] = 0.0
    return torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def cut(probs, top_ks, top_ps):
    """Shares of the tokens that SGLang samples from in a batch, with the hook."""
    found = (top_ks < ALL).tolist()
    info = SimpleNamespace(
        top_ks=top_ks,
        top_ps=top_ps,
        need_top_k_sampling=any(found),
        need_top_p_sampling=bool((top_ps != 1).any()),
        max_top_k=int(top_ks.max()) if all(found) else None,
    )
    return cut_by_top_k_first(lambda _sampler, probs, info: sglang_cut(probs, info.top_ks, info.top_ps), 0, probs, info)


def cut_by_sorting(probs, top_ks, top_ps):
    """The same, by the definition."""
    least = probs.sort(-1, descending=True).values.gather(-1, top_ks.clamp(max=probs.shape[-1]).long()[:, None] - 1)
    kept = probs.masked_fill(probs < least, 0)
    return sglang_cut(kept / kept.sum(-1, keepdim=True), top_ks, top_ps)


class Order(TorchDispatchMode):
    """Counts how many columns are put in order, by which operation."""

    def __init__(self):
        super().__init__()
        self.columns = []

    def __torch_dispatch__(self, function, _types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in ("sort", "topk"):
            self.columns.append((name, arguments[1] if name == "topk" else arguments[0].shape[-1]))
        return function(*arguments, **(named or {}))


def test_top_p_is_a_share_of_what_top_k_keeps():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).repeat(4, 1)
    top_ks, top_ps = torch.tensor([2, 2, ALL, 3], dtype=torch.int32), torch.tensor([0.5, 0.6, 0.65, 1.0])
    # The first alone is 0.57 of 0.4 and 0.3.
    expected = torch.tensor(
        [[0, 1, 0, 0], [0, 4 / 7, 3 / 7, 0], [0, 4 / 7, 3 / 7, 0], [0, 4 / 9, 3 / 9, 2 / 9]],
    )
    torch.testing.assert_close(cut(probs, top_ks, top_ps), expected)
    torch.testing.assert_close(cut(probs[[0, 1, 3]], top_ks[[0, 1, 3]], top_ps[[0, 1, 3]]), expected[[0, 1, 3]])
    assert sglang_cut(probs[:1], top_ks[:1], top_ps[:1])[0, 2] > 0
    assert probs.tolist() == torch.tensor([[0.1, 0.4, 0.3, 0.2]]).repeat(4, 1).tolist()


def test_tokens_as_likely_as_the_last_that_top_k_keeps_are_left_to_the_server():
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    found = cut(probs, torch.tensor([2]), torch.tensor([0.9]))
    assert sorted(found[0].tolist()) == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("top_k", "top_p", "ordered"),
    [
        ([ALL, ALL], [0.9, 0.5], []),
        ([20, 7], [1.0, 1.0], []),
        ([20, 7], [0.9, 1.0], [("topk", 20)]),
        ([20, 5000], [0.9, 1.0], [("topk", 1000)]),
        ([ALL, 7], [0.9, 0.9], [("topk", 1000)]),
    ],
)
def test_as_many_tokens_are_put_in_order_as_both_cuts_need(top_k, top_p, ordered):
    """The server's own sort, for each draw by a seed, comes after."""
    probs = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    top_ks, top_ps = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p)
    with Order() as order:
        found = cut(probs, top_ks, top_ps)
    assert order.columns == [*ordered, ("sort", 1000)]
    torch.testing.assert_close(found, cut_by_sorting(probs, top_ks, top_ps))
    assert torch.equal(found > 0, cut_by_sorting(probs, top_ks, top_ps) > 0)


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


class Copies(TorchFunctionMode):
    """Notes how seeds come to a GPU that is not there: they stay where they are."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_function__(self, function, _types, arguments=(), named=None):
        if function in (torch.Tensor.pin_memory, torch.Tensor.to):
            self.noted.append((function.__name__, *arguments[1:], named or {}))
            return arguments[0]
        return function(*arguments, **(named or {}))


def of_seeds(*seeds):
    return SimpleNamespace(
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    )


def test_seeds_are_copied_to_the_gpu_without_waiting_for_it():
    """From pinned memory: without, the copy waits although it is told not to."""
    gpu = torch.device("cuda", 0)
    info = SimpleNamespace(temperatures=SimpleNamespace(device=gpu))
    with Copies() as copies:
        draw_by_seed(info, object, of_seeds(5, 2**40))
    assert copies.noted == [("pin_memory", {}), ("to", gpu, {"non_blocking": True})]
    assert info.sampling_seed.tolist() == [5, 2**40]


def test_seeds_are_those_of_all_samples_or_none():
    info = SimpleNamespace(temperatures=torch.ones(2, 1), sampling_seed="as it was")
    draw_by_seed(info, object, of_seeds(5, None))
    assert info.sampling_seed == "as it was"
    draw_by_seed(info, object, of_seeds(5, 7))
    assert info.sampling_seed.tolist() == [5, 7]
    assert info.sampling_seed.dtype == torch.int64


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Folders of packages in which a torch of a version of CUDA finds the runtimes that are named."""

    def installed(cuda, *runtimes):
        monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for runtime in runtimes:
            library = tmp_path / "nvidia" / runtime
            library.parent.mkdir(parents=True, exist_ok=True)
            library.touch()
        return tmp_path / "nvidia"

    return installed


@pytest.mark.parametrize(
    ("cuda", "folder"), [("13.0", "cu13/lib"), ("12.9", "cuda_runtime/lib"), ("14.0", None), (None, None)]
)
@pytest.mark.parametrize("given", [None, "", "/own", "/own:/usr/local/cuda/lib64"])
def test_processes_find_the_runtime_that_torch_has_after_what_is_given(packages, monkeypatch, cuda, folder, given):
    there = packages(cuda, "cu13/lib/libcudart.so.13", "cuda_runtime/lib/libcudart.so.12")
    if given is None:
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    else:
        monkeypatch.setenv("LD_LIBRARY_PATH", given)
    # Once for each worker.
    for _ in range(2):
        find_cuda_runtime(object())
    found = f"{there / folder}" if folder else None
    expected = f"{given}:{found}" if given and found else found or given
    assert os.environ.get("LD_LIBRARY_PATH") == expected
