"""Transfers into engines that hold a number format, without processes: every message is packed here and unpacked."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from quantised_specs import BUCKET_BYTES, ONE, SPECS, empty, make_spec
from transfer_scenes import LOOPBACK, STEP, shard_of

from converters.boxes import Box
from converters.cost import formats, traffic
from converters.errors import UserError
from converters.layouts.huggingface import huggingface_layout
from converters.number_formats import FP8_BLOCK, INT8_CHANNEL, MXFP8
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.messages import cut_into_messages, digest
from megarl.resharding.direct.packing import blocks, differing, pack, unpack
from megarl.resharding.direct.quantised_shard import CutBlocksError
from megarl.resharding.direct.relay_readiness import RelayReadiness
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.staging import Staging
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.typed_transfers import Scales, TypedTransfer


def values_of(spec, rank, version=3):
    tensors = shard_of(spec.plan.source, rank, version)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def expected_of(spec, worker, version=3):
    """The worker's tensors, of codes that were made of the whole HuggingFace tensors."""
    shapes = spec.architecture.hf_shapes
    hf = shard_of(huggingface_layout(shapes), 0, version)
    number_format = spec.quantisation.number_format
    quantised = number_format.quantised_names(spec.architecture)
    checkpoint = {}
    for name, values in hf.items():
        checkpoint[name] = values.to(torch.bfloat16)
        if name in quantised:
            codes, scales = number_format.quantise(checkpoint[name])
            checkpoint |= {name: codes, number_format.scales_name(name): scales}
    trace = spec.traces[worker]
    tensors = empty(trace)
    for hf_name, hf_box, name, box in trace.shard.placements:
        tensors[name][box.slices()] = checkpoint[hf_name][hf_box.slices()]
    return tensors


def move(messages, tensors_from, tensors_to, compared=None):
    for message in messages:
        bucket = torch.zeros(message.size_bytes, dtype=torch.uint8)
        sent = pack(blocks(message, bucket, tensors_from, "source"), with_checksum=True)
        there = blocks(message, bucket, tensors_to, "destination")
        if compared is not None:
            compared.update(differing(there, [name for name in tensors_to if name.startswith("values of ")]))
        else:
            assert unpack(there, with_checksum=True) == sent


def raw(tensors):
    return {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}


def equal(found, expected):
    found, expected = raw(found), raw(expected)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", SPECS)
def test_workers_get_the_codes_of_whole_tensors_wherever_they_were_cut(name):
    spec = make_spec(*SPECS[name])
    workers, ranks = len(spec.traces), spec.plan.destination_ranks
    sent = [spec.outgoing(rank) for rank in range(spec.parallel.world_size)]
    got = [spec.incoming(rank) for rank in range(ranks)]
    tensors = [empty(spec.traces[rank % workers]) for rank in range(ranks)]
    staging = [Staging(spec.quantised[rank % workers], got[rank], tensors[rank]) for rank in range(ranks)]
    everything = [{**own, **staged.tensors} for own, staged in zip(tensors, staging, strict=True)]
    # MXFP8 has blocks so small that none is cut.
    cut = spec.quantisation.number_format is not MXFP8
    assert any(each.tensors for each in staging) == cut, "no cut goes through a block"
    held = [sum(tensor.nbytes for tensor in each.tensors.values()) for each in staging]
    assert [spec.staged_bytes(rank) for rank in range(ranks)] == held
    for rank, by_destination in enumerate(sent):
        values = values_of(spec, rank)
        for destination, messages in by_destination.items():
            assert digest(messages) == digest(got[destination].direct[rank])
            assert all(message.size_bytes <= BUCKET_BYTES for message in messages)
            move(messages, values, everything[destination])
    relayed = 0
    for rank, messages in enumerate(got):
        RelayReadiness(messages)
        for neighbour, relays in messages.relays_out.items():
            assert digest(relays) == digest(got[neighbour].relays_in[rank])
            move(relays, everything[rank], everything[neighbour])
            relayed += len(relays)
    assert bool(relayed) == spec.node_once
    for rank in range(ranks):
        staging[rank].quantise()
        assert equal(tensors[rank], expected_of(spec, rank % workers))
        assert staging[rank].differing() == set()


def test_a_comparison_names_codes_and_scales_that_differ():
    spec = make_spec(*SPECS["one rank to one worker"])
    (messages,) = spec.outgoing(0).values()
    tensors = expected_of(spec, 0)
    staging = Staging(spec.quantised[0], spec.incoming(0), tensors)
    cut, whole = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"
    for expected in (set(), {cut, f"{whole}_scale_inv"}):
        found = set()
        move(messages, values_of(spec, 0), {**tensors, **staging.tensors}, found)
        assert found | staging.differing() == expected
        tensors[cut].view(torch.uint8)[5, 7] ^= 1
        tensors[f"{whole}_scale_inv"][0, 0] *= 2


@pytest.mark.parametrize("number_format", [FP8_BLOCK, INT8_CHANNEL, MXFP8])
def test_a_matrix_that_torch_quantises_in_parts_has_the_codes_of_the_whole(number_format):
    # Rows with gaps, which machine code leaves to torch, in parts that stay in the processor's cache.
    values = torch.randn(1300, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()[:, ::2]
    expected = dict(zip(("codes", "scales"), number_format.quantise(values), strict=True))
    whole, of_scales = Box.whole(values.shape), Box.whole(expected["scales"].shape)
    scales = Scales("scales", of_scales, number_format.name)
    (message,) = cut_into_messages([TypedTransfer("w", whole, "codes", whole, number_format.codes, scales)], 2**22)
    bucket = torch.zeros(message.size_bytes, dtype=torch.uint8)
    packed = blocks(message, bucket, {"w": values}, "source")
    assert len(packed) > 2
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    checksum = pack(packed, with_checksum=True)
    assert unpack(blocks(message, bucket, found, "destination"), with_checksum=True) == checksum
    assert equal(found, expected)


@pytest.mark.parametrize("name", SPECS)
def test_the_plan_counts_the_bytes_that_travel(name):
    spec = make_spec(*SPECS[name])
    counted = traffic(spec.plan, formats(spec.architecture, number_format=spec.quantisation.number_format))
    for rank in range(spec.parallel.world_size):
        for destination, messages in spec.outgoing(rank).items():
            assert bytes_of(messages) == counted.direct[rank, destination]
    for rank in range(spec.plan.destination_ranks):
        for neighbour, messages in spec.incoming(rank).relays_out.items():
            assert bytes_of(messages) == counted.relayed[rank, neighbour]
        assert spec.staged_bytes(rank) == counted.staged[rank]


def bytes_of(messages):
    """Without what aligns pieces in a bucket."""
    pieces = [piece for message in messages for piece in message.pieces]
    return sum(piece.size_bytes + (piece.scales.size_bytes if piece.scales else 0) for piece in pieces)


def move_and_quantise(messages, values, tensors, staging):
    move(messages, values, {**tensors, **staging.tensors})
    staging.quantise()


@pytest.mark.parametrize("name", ["two ranks to two workers", "two engines whose workers relay"])
def test_changes_of_codes_of_scales_and_of_values_in_cut_blocks(name):
    spec, tensors, moved = make_spec(*SPECS[name]), [], []
    values = [values_of(spec, rank) for rank in range(2)]
    senders = [Sender(rank, spec.outgoing(rank), values[rank], LOOPBACK) for rank in range(2)]
    destinations = []
    for rank in range(spec.plan.destination_ranks):
        worker, messages = rank % len(spec.traces), spec.incoming(rank)
        tensors.append(empty(spec.traces[worker]))
        staging = Staging(spec.quantised[worker], messages, tensors[rank])
        destinations.append(Destination(rank, messages, tensors[rank], staging))
    addresses = [sender.address for sender in senders]
    relays = [destination.address for destination in destinations]
    rendezvous = Rendezvous(
        "shared_memory", b"key", addresses, None, len(destinations), 20.0, relays, with_changes=True
    )
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        for end in (*senders, *destinations):
            stack.callback(end.close)
        list(pool.map(lambda end: end.connect(rendezvous), [*senders, *destinations]))
        for version in (3, 3 + STEP):
            for rank, held in enumerate(values):
                torch._foreach_copy_(list(held.values()), list(values_of(spec, rank, version).values()))
            receiving = [pool.submit(destination.receive, version) for destination in destinations]
            sent = [pool.submit(sender.send, version) for sender in senders]
            moved.append(sum(each.result().size_bytes for each in sent))
            for rank, each in enumerate(receiving):
                each.result()
                assert equal(tensors[rank], expected_of(spec, rank % len(spec.traces), version))
    assert moved[1] < 0.5 * moved[0]


def test_weights_that_have_no_codes_are_named():
    spec = make_spec(*SPECS["one rank to one worker"])
    (messages,) = spec.outgoing(0).values()
    got = spec.incoming(0)
    for name, box, says in (
        ("decoder.layers.0.mlp.linear_fc2.weight", (3, 4), "decoder.layers.0.mlp.linear_fc2.weight: block 0, 0"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", (-1, -1), "v_proj.weight: block 0, 1"),
    ):
        values, tensors = values_of(spec, 0), empty(spec.traces[0])
        values[name][box] = torch.nan
        staging = Staging(spec.quantised[0], got, tensors)
        with pytest.raises(ValueError, match=rf"{says} holds a weight that is NaN"):
            move_and_quantise(messages, values, tensors, staging)


def test_an_engine_that_cuts_through_blocks_and_a_bucket_without_room_are_refused():
    spec = make_spec(*SPECS["one rank to one worker"])
    with pytest.raises(UserError, match=r"refit\.bucket_bytes is too small for a quantised block: raise it to 33"):
        replace(spec, bucket_bytes=16_000).outgoing(0)
    (trace,) = spec.traces
    moved = [
        each._replace(hf_box=each.hf_box.shift((64, 0))) if "o_proj.weight" in each.hf_name else each
        for each in trace.shard.placements
    ]
    cut = replace(trace, shard=replace(trace.shard, placements=moved))
    with pytest.raises(
        CutBlocksError, match=r"the engine cuts model\.layers\.[01]\.self_attn\.o_proj\.weight through its"
    ):
        _ = replace(spec, traces=[cut]).quantised


def test_an_engine_that_cuts_rows_whose_scale_is_of_all_of_them_gets_no_direct_weights():
    spec = make_spec("qwen3", ONE, 1, 1, None, INT8_CHANNEL)
    (trace,) = spec.traces
    halves = [
        each._replace(hf_box=Box((0, 0), (each.hf_box.shape[0], each.hf_box.shape[1] // 2)))
        if each.hf_name.endswith("o_proj.weight")
        else each
        for each in trace.shard.placements
    ]
    cut = replace(trace, shard=replace(trace.shard, placements=halves))
    with pytest.raises(
        CutBlocksError, match=r"the engine cuts model\.layers\.[01]\.self_attn\.o_proj\.weight through its"
    ):
        _ = replace(spec, traces=[cut]).quantised
