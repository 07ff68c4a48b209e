"""Weights that trainer ranks write straight into an engine's parameters."""

import time

import pytest
from engine_host import GREEDY, PROMPTS, check_that_changes_any_serving

from megarl.data.stretches import fetch
from megarl.resharding.direct.connections import TransferError
from megarl.rollout.protocol import Request, UpdateError

both_kinds = pytest.mark.parametrize("kind", ["vllm", "transformers"])
JOINED = {
    "vllm": "model.layers.1.self_attn.qkv_proj.weight",
    "transformers": "model.layers.1.mlp.experts.2.up_proj.weight",
}
"""A tensor that is a part of one of the engine's parameters, as the engine calls it."""


@both_kinds
def test_an_engine_serves_what_was_written_into_its_parameters(served, folders, make_trainer, assert_greedy):
    trainer = make_trainer(served.engine, folders[0])
    check_that_changes_any_serving(trainer, served, assert_greedy)
    trainer.update(served.engine.version() + 1)
    assert_greedy(folders[1], PROMPTS[0], served.greedy(PROMPTS[0]))


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_weights_come_from_another_machine(served, folders, make_trainer, assert_greedy, transport):
    trainer = make_trainer(served.engine, folders[0])
    check_that_changes_any_serving(trainer, served, assert_greedy, transport)


@both_kinds
def test_a_comparison_says_whether_a_load_left_what_the_plan_would(served, kind, folders, make_trainer, assert_greedy):
    trainer = make_trainer(served.engine, folders[0])
    trainer.connect()
    trainer.load(folders[0])
    assert trainer.compare(7) == set()
    trainer.load(folders[1])
    found = trainer.compare(8)
    assert {"lm_head.weight", JOINED[kind]} <= found
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))


@pytest.mark.parametrize(
    ("point", "count", "action", "message"),
    [
        ("packed", 1, "kill", "is gone"),
        ("announced", 3, "kill", "is gone"),
        ("packed", 4, "fail", "trainer rank 1 failed: on purpose"),
        ("packed", 2, "corrupt", "came with checksum"),
        ("packed", 3, "stop", r"refit\.timeout_s"),
    ],
)
def test_a_transfer_that_fails_leaves_the_engine_fenced(
    served, folders, asked, make_trainer, assert_greedy, point, count, action, message
):
    trainer = make_trainer(served.engine, folders[0])
    # Where a busy engine takes seconds to meet the ranks, too; one that stands still is waited for to its end.
    trainer.connect(timeout_s=5.0 if action == "stop" else 120.0)
    trainer.load(folders[1])
    trainer.ranks[1].break_at(point, count, action)
    new = served.engine.version() + 1
    names = list(trainer.spec.architecture.hf_shapes)
    served.engine.begin_update(new, names)
    generating = asked(served.engine).ask(Request(PROMPTS[0], GREEDY))
    trainer.begin_send(new)
    with pytest.raises(TransferError, match=message):
        served.engine.receive(new)
    with pytest.raises(UpdateError, match=f"after update {new} failed: begin it again"):
        served.engine.commit_update(new)
    with pytest.raises(UpdateError, match=f"after update {new} failed: begin it again"):
        served.engine.receive(new)
    time.sleep(0.3)
    assert not generating.done()
    if action in ("fail", "corrupt"):
        # All ranks are there: they meet again.
        trainer.connect()
        trainer.update(new)
        weights = folders[1]
    else:
        served.update(served.first, new)
        weights = folders[0]
    ((generation,),) = generating.result(60)
    assert set(fetch(generation.versions).tolist()) == {new}
    assert_greedy(weights, PROMPTS[0], generation)


def test_what_an_engine_was_not_asked_for_it_refuses(served, folders, make_trainer):
    new = served.engine.version() + 1
    with pytest.raises(UpdateError, match="receive without begin_update"):
        served.engine.receive(new)
    trainer = make_trainer(served.engine, folders[0])
    served.engine.begin_update(new, list(trainer.spec.architecture.hf_shapes))
    with pytest.raises(UpdateError, match=f"version {new + 1} cannot be written"):
        served.engine.receive(new + 1)
    with pytest.raises(TransferError, match="is not connected for a transfer"):
        served.engine.receive(new)
    served.update(served.first, new)
