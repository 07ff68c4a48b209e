"""Tensors that SGLang takes in one call alone, which come in different buckets."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.sglang.loaded_together import LoadedTogether

JOINS, JOINS_NOT = SimpleNamespace(q_lora_rank=4), SimpleNamespace(q_lora_rank=None)
SUFFIXES = ("weight", "weight_scale_inv")
PAIRS = [
    (f"model.layers.{layer}.self_attn.q_a_proj.{suffix}", f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.{suffix}")
    for layer in range(2)
    for suffix in SUFFIXES
]
OTHERS = [
    "model.layers.0.self_attn.q_b_proj.weight",
    "model.layers.1.self_attn.kv_a_layernorm.weight",
    "lm_head.weight",
]
NAMES = [*(name for pair in PAIRS for name in pair), *OTHERS]


@given(st.data())
def test_pairs_are_given_at_once_and_all_is_given_once(data):
    names = data.draw(st.permutations(NAMES))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1))))
    values = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    together, given_so_far = LoadedTogether(JOINS), []
    for start, stop in zip([0, *cuts], [*cuts, len(names)], strict=True):
        ready = together.ready({name: values[name] for name in names[start:stop]})
        assert all(torch.equal(tensor, values[name]) for name, tensor in ready.items())
        assert all((first in ready) == (second in ready) for first, second in PAIRS)
        assert {*names[start:stop]} & {*OTHERS} <= ready.keys()
        given_so_far.extend(ready)
    assert sorted(given_so_far) == sorted(names)
    assert together.waiting() == []


def test_an_update_that_is_given_up_leaves_nothing():
    together = LoadedTogether(JOINS)
    first, second = PAIRS[0]
    assert together.ready({first: torch.ones(1)}) == {}
    assert together.waiting() == [first]
    together.forget()
    assert together.ready({second: torch.ones(1)}) == {}
    assert together.waiting() == [second]


def test_a_model_without_a_latent_of_queries_joins_nothing():
    tensor = torch.ones(1)
    assert LoadedTogether(JOINS_NOT).ready({PAIRS[0][1]: tensor}) == {PAIRS[0][1]: tensor}
    assert LoadedTogether(SimpleNamespace()).ready({PAIRS[0][0]: tensor}) == {PAIRS[0][0]: tensor}
