"""Changes of messages: what they say of any bytes, and which transfers go wrong and are made whole again."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import make_config
from transfer_scenes import STEP, Scene
from transfer_stages import failures

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.resharding.alignment import aligned
from megarl.resharding.direct import changes
from megarl.resharding.direct.changes import SentMessages, apply_changes, changes_of
from megarl.resharding.direct.transports.endpoint import Rendezvous

SCENE = Scene(make_config("qwen3"), ParallelSizes(world_size=2, tensor_model_parallel_size=2))
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
SPECIAL = (float("nan"), float("inf"), 0.0, -0.0, 1e-40)
MESSAGE = (0, 0)


def bits(tensor):
    """A message, of aligned size."""
    raw = tensor.view(torch.uint8)
    return torch.cat([raw, raw.new_zeros(aligned(len(raw)) - len(raw))])


@st.composite
def pairs(draw):
    """The bytes of a tensor and of another one, in which a share of the elements is another."""
    dtype, size = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 3000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    before = torch.randn(size, generator=generator).mul(40).to(dtype)
    after = before.clone()
    chosen = torch.rand(size, generator=generator) < draw(st.sampled_from((0.0, 0.01, 0.5, 1.0)))
    after[chosen] = torch.randn(size, generator=generator)[chosen].mul(40).to(dtype)
    if dtype.is_floating_point:
        special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (size,), generator=generator)].to(dtype)
        marked = torch.rand(size, generator=generator) < 0.01
        after[marked] = special[marked]
        before[marked.flip(0)] = -special[marked.flip(0)]
    return bits(before), bits(after)


@given(pairs(), st.sampled_from((64, 192, 2**20)))
@settings(max_examples=150, deadline=None)
def test_changes_make_of_any_bytes_any_others(pair, chunk_bytes):
    before, after = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_CHUNK_BYTES", chunk_bytes)
        kept = before.clone()
        found, changed = changes_of(after, kept)
        assert torch.equal(kept, after)
        assert changed == int((before.view(torch.int16) != after.view(torch.int16)).sum())
        if found is None:
            assert changed
        else:
            assert len(found) < len(after)
            apply_changes(found, before)
            assert torch.equal(before, after)


def test_few_changes_are_few_bytes_and_other_bytes_are_all():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(100_000, generator=generator).to(torch.bfloat16)
    after = before.clone()
    after[::50] *= 1 + 2**-7
    sent = SentMessages()
    memory = bits(before)
    for version, moved, since in ((3, len(memory), None), (4, 0.05 * len(memory), 3), (5, 0.01 * len(memory), 4)):
        memory = bits(before if version == 3 else after)
        found, of = sent.replace(MESSAGE, version, memory)
        assert of == since
        assert found.size_bytes == moved if since is None else found.size_bytes < moved
        assert found.changed == (2000 if version == 4 else 0)
    random = torch.randint(256, (len(memory),), dtype=torch.uint8, generator=generator)
    memory = random.clone()
    found, since = sent.replace(MESSAGE, 6, memory)
    assert (found.size_bytes, since) == (len(memory), None)
    assert torch.equal(memory, random)
    assert sent.replace(MESSAGE, 7, memory)[1] == 6


@pytest.mark.parametrize(
    ("garble", "reason"),
    [
        (lambda found: found[:2], "^changes of 2 bytes for 1 chunks"),
        (lambda found: found[:-7], "^changes that cannot be read: "),
        (lambda found: torch.cat([found[:4], found[4:].bitwise_not()]), "^changes that cannot be read: "),
        (lambda found: changes_of(torch.ones(640, dtype=torch.uint8), torch.zeros(640, dtype=torch.uint8))[0], "640"),
    ],
)
def test_what_is_no_changes_of_this_message_is_refused(garble, reason):
    found, _ = changes_of(torch.ones(6400, dtype=torch.uint8), torch.zeros(6400, dtype=torch.uint8))
    with pytest.raises(ValueError, match=reason):
        apply_changes(garble(found), torch.zeros(6400, dtype=torch.uint8))


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "rdma"])
def test_a_worker_with_other_weights_gets_everything(set_up, transport):
    stage = set_up(replace(SCENE, transport=transport))
    stage.connect(with_changes=True)
    whole = stage.bytes_of_refit(0)
    changes = stage.bytes_of_refit(STEP)
    assert changes < 0.4 * whole

    # One message of one worker comes as changes of other bytes than these, and then whole.
    stage.destinations[1].scramble("decoder.layers.1.mlp.linear_fc2.weight")
    of_scrambled = stage.bytes_of_refit(2 * STEP)
    assert changes < of_scrambled < 0.8 * whole

    # All messages of one of two workers.
    stage.destinations[0].forget()
    of_forgetful = stage.bytes_of_refit(3 * STEP)
    assert 0.9 * (changes + whole / 2) < of_forgetful < 1.1 * (changes + whole / 2)
    assert stage.bytes_of_refit(4 * STEP) < 0.4 * whole


def test_changes_without_checksums_are_refused():
    with pytest.raises(ValueError, match="they need checksums"):
        Rendezvous("shared_memory", b"key", [], None, 1, 20.0, with_checksum=False, with_changes=True)


def test_weights_are_not_compared_with_changes(set_up):
    stage = set_up(SCENE)
    stage.connect(with_changes=True)
    stage.refit(0)
    comparing = stage.begin(stage.destinations, "compare", 0)
    found = failures(stage.begin(stage.sources, "send", 0) + comparing)
    assert any("weights are compared whole, and changes came" in error for error in found[2:])


def test_a_gpu_without_room_for_what_becomes_whole_is_told_of_when_ranks_meet(set_up):
    stage = set_up(replace(SCENE, transport="rdma", played_cuda=True))
    stage.destinations[1].break_at("connected", 1, "fill the GPU")
    found = failures(stage.begin_connect(stage.rendezvous(with_changes=True)))
    assert any(error.startswith("TransferError: GPU ") and "has no memory for a bucket" in error for error in found[2:])


def test_changes_that_lead_to_other_bytes_than_were_meant_come_whole(set_up):
    stage = set_up(SCENE)
    stage.connect(with_changes=True)
    stage.refit(0)
    usual = stage.bytes_of_refit(STEP)
    stage.sources[1].break_at("packed", 2, "corrupt")
    assert stage.bytes_of_refit(2 * STEP) > 1.2 * usual


def test_what_is_wrong_when_it_comes_whole_does_not_come_again(set_up):
    stage = set_up(SCENE)
    stage.connect(with_changes=True)
    stage.sources[1].break_at("packed", 2, "corrupt")
    assert any("came with checksum" in error for error in failures(stage.begin_refit(0)))
