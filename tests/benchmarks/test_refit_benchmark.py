"""The parts of `benchmarks/refit.py` that its own comparison of values does not cover."""

import os
import time
from multiprocessing import Pipe

import pytest
import torch
from eventually import eventually
from resharding import values
from resharding.contenders.table import DIRECT, MEMCPY
from resharding.contenders.whole_tensors import Copies, buckets, packed, packed_bytes
from resharding.forecasting import Way, forecast
from resharding.memory import Growth, held_by
from resharding.models import ENGINES, MODELS, TRAINERS
from resharding.party import Party
from resharding.processes import Place, RankFailedError, Timed, _answer, hear, running, say
from resharding.rates import CoreRates, WayCosts
from resharding.rates import typed_transfers as rates_transfers
from resharding.rounds import Facts, Run
from resharding.scenario import DTYPE, Scenario
from resharding.tables import Results, markdown, sentences
from small_configs import make_config

from converters.copying import copy_transfers
from converters.plan import Plan
from megarl.resharding.direct.messages import cut_into_messages

SMALL = Scenario(make_config("qwen3_moe"), None, 700)


@pytest.mark.parametrize(
    ("name", "trainer", "engine"),
    [
        *((name, "TP2 x EP2 x PP2", "TP2") for name in MODELS),
        *(("qwen3_moe_thirds" if engine == "TP3" else "qwen3_moe", "one rank", engine) for engine in ENGINES),
    ],
)
def test_models_have_their_size_and_no_byte_moves_that_is_not_needed(name, trainer, engine):
    scenario = Scenario(MODELS[name], None, 16_000_000, trainer, engine)
    assert scenario.model_bytes() == pytest.approx(100e6 if name.endswith("_100mb") else 400e6, rel=0.05)
    destination = scenario.engine
    sent = [scenario.outgoing(destination, rank) for rank in range(TRAINERS[trainer].world_size)]
    sizes = [message.size_bytes for streams in sent for stream in streams.values() for message in stream]
    assert max(sizes) <= 16_000_000
    assert scenario.needed_bytes(destination) <= sum(sizes) < 1.0001 * scenario.needed_bytes(destination)


def test_an_engine_in_fp8_gets_half_the_bytes_where_its_cuts_leave_blocks_whole():
    scenario = Scenario(MODELS["qwen3_moe_100mb"], None, 16_000_000, "one rank", "TP2")
    sent = sum(message.size_bytes for each in scenario.outgoing(scenario.fp8_engine, 0).values() for message in each)
    came = [scenario.incoming(scenario.fp8_engine, rank)[0] for rank in range(2)]
    assert sent == sum(message.size_bytes for each in came for message in each)
    assert sent == pytest.approx(scenario.needed_bytes(scenario.fp8_engine), rel=1e-3)
    assert sent < 0.56 * scenario.model_bytes()
    # Each of four workers would have 192 rows of an expert's 768.
    assert Scenario(MODELS["qwen3_moe_100mb"], None, 16_000_000, "one rank", "TP4").fp8_engine is None


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, engine) for name in ("qwen3_moe_wide", "qwen3_moe_wide_100mb") for engine in ("TP1", "TP2", "TP4")),
        ("qwen3_moe_thirds", "TP3"),
    ],
)
def test_a_wide_model_has_whole_blocks_for_each_of_the_workers(name, engine):
    scenario = Scenario(MODELS[name], None, 16_000_000, "TP2 x EP2 x PP2", engine)
    came = [scenario.incoming(scenario.fp8_engine, rank) for rank in range(ENGINES[engine].world_size)]
    received = sum(message.size_bytes for of_rank in came for each in of_rank.values() for message in each)
    assert received == pytest.approx(scenario.needed_bytes(scenario.fp8_engine), rel=1e-3)
    assert received < 0.56 * scenario.needed_bytes(scenario.engine)


def test_a_forecast_has_no_numbers_but_the_measured_ones():
    rates = CoreRates(4e9, 3e9, 2e9, 1e9, 4e9, 3e9, 8e9)
    twice = CoreRates(**{name: 2 * rate for name, rate in vars(rates).items()})
    for way in (Way("shared_memory", ""), Way("tcp", ""), Way("rdma", "")):
        slow = forecast(SMALL, way, rates, WayCosts(6e-10, 4e-10, 2e-5), cores=2)
        fast = forecast(SMALL, way, twice, WayCosts(3e-10, 2e-10, 1e-5), cores=2)
        assert slow.replay.seconds == pytest.approx(2 * fast.replay.seconds, rel=1e-3)
        assert slow.stages["cores"] <= slow.replay.seconds < 2 * slow.stages["cores"]
    for name, typed_transfer in rates_transfers().items():
        assert cut_into_messages([typed_transfer], 16_000_000), name


def small_party(rank):
    return Party(Place(rank, SMALL.ranks, {}), SMALL)


def test_every_element_in_a_wrong_place_is_found():
    sources = [small_party(rank) for rank in range(SMALL.trainer.ranks)]
    worker = small_party(SMALL.trainer.ranks + 1)
    written = worker.written["engine"]
    assert worker.number == 1
    assert set(worker.wrong("engine")) == set(written)
    for transfer in Plan(SMALL.trainer, SMALL.engine).transfers_into(1):
        copy_transfers([transfer], sources[transfer.source_rank].tensors, written)
    assert worker.wrong("engine") == []
    # The norms' values are not all the same, nor are neighbours.
    for name, tensor in written.items():
        before = tensor.clone()
        tensor.copy_(before.flatten().roll(1).view(tensor.shape))
        assert worker.wrong("engine") == [name]
        tensor.copy_(before)
    worker.wipe("engine")
    assert set(worker.wrong("engine")) == set(written)


def test_values_are_finite_and_differ_between_tensors():
    one, other = (values.hf_values(name, (300, 200), DTYPE) for name in ("one", "other"))
    assert one.isfinite().all()
    assert (one != other).float().mean() > 0.9
    assert torch.equal(one, values.hf_values("one", (300, 200), torch.float32).to(DTYPE))


def test_whole_tensors_fill_buckets_and_only_a_large_one_has_more_than_the_limit():
    shapes = {"a": (10,), "b": (3, 5), "large": (500,), "c": (16,), "d": (16,), "e": (16,)}
    dtypes = dict.fromkeys(shapes, torch.float32) | {"a": torch.bfloat16}
    found = buckets(shapes, shapes, dtypes, 128)
    assert [list(bucket.offsets) for bucket in found] == [["a", "b"], ["large"], ["c", "d"], ["e"]]
    assert [bucket.size_bytes for bucket in found] == [128, 2048, 128, 64]
    memory = torch.zeros(128, dtype=torch.uint8)
    tensors = found[0].tensors(memory, shapes, dtypes)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"a": (10,), "b": (3, 5)}
    tensors["b"].fill_(1)
    assert not tensors["a"].any()


def test_what_is_packed_and_put_together_is_the_whole_model():
    parties = [small_party(rank) for rank in range(SMALL.trainer.ranks)]
    plan = Plan(SMALL.trainer, SMALL.huggingface)
    dtypes = parties[0].hf_dtypes
    whole = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in SMALL.huggingface.hf_shapes.items()}
    for party in parties:
        transfers = plan.transfers_from(party.number)
        memory = torch.zeros(packed_bytes(transfers, dtypes), dtype=torch.uint8)
        views = packed(transfers, memory, dtypes)
        Copies(views, [party.tensors[each.source_name][each.source_box.slices()] for each in transfers]).run()
        into = [whole[each.hf_name][each.destination_box.slices()] for each in transfers]
        Copies(into, views).run()
    assert values.wrong(SMALL.huggingface, 0, whole, dtypes) == []


class Pair:
    """Two ranks that talk, and fail."""

    def __init__(self, place, greeting):
        self.place = place
        self.greeting = greeting

    def talk(self):
        if self.place.rank == 0:
            say(self.place.pipes[1], 7)
            return self.greeting
        return hear(self.place.pipes[0])

    def idle(self):
        time.sleep(0.2 * self.place.rank)

    def fail(self):
        if self.place.rank == 1:
            raise ValueError("on purpose")

    def end(self):
        os._exit(3)


def test_ranks_answer_are_timed_and_their_failures_are_told():
    with running(2, Pair, "hello") as ranks:
        assert ranks.call("talk") == ["hello", 7]
        timed = ranks.time("idle")
        # On a busy machine it ends later, and takes no more of a core.
        assert timed.seconds > 0.19
        assert timed.cpu_seconds < 0.1
        with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed:.*on purpose"):
            ranks.call("fail")
        with pytest.raises(RankFailedError, match="has ended"):
            ranks.call("end")


@pytest.mark.parametrize("has_read", [True, False])
def test_a_rank_that_is_gone_is_told_whatever_it_had_read(has_read):
    here, there = Pipe()
    here.send("command")
    if has_read:
        there.recv()
    there.close()
    with pytest.raises(RankFailedError, match="rank 3 has ended"):
        _answer(3, here)


def test_growth_is_the_most_that_was_held_in_between():
    with Growth(lambda: [held_by(os.getpid())]) as growth:
        held = torch.ones(50_000_000, dtype=torch.uint8)
        assert eventually(lambda: growth.of_ranks[0].anonymous > 40e6)
        del held
    assert growth.of_ranks[0].anonymous == pytest.approx(50e6, rel=0.1)


def test_ratios_are_those_within_a_round():
    # The machine becomes slower and slower; the ratio stays.
    runs = [
        Run(name, number, Timed(seconds * 2**number, [0.5]))
        for number in range(3)
        for name, seconds in ((MEMCPY, 0.1), (DIRECT, 0.13))
    ]
    facts = {name: Facts(200_000_000, 32_000_000, 0) for name in (MEMCPY, DIRECT)}
    results = Results(180_000_000, 200_000_000, facts, runs)
    assert results.ratio(DIRECT, MEMCPY).of_rounds == pytest.approx([1.3, 1.3, 1.3])
    assert list(sentences(results)) == [
        "direct, checksums: 1.30 (1.30 to 1.30) x the seconds of memcpy; the aim is at most 1.5."
    ]
    cells = [cell.strip() for cell in markdown(results).splitlines()[3].split("|")[1:-1]]
    assert cells == [DIRECT, "0.260", "0.130 to 0.520", "0.77", "1.30", "0.500", "1.00", "32", "0"]
