"""A rank that ends, stops, fails or sends something else while weights are relayed: its neighbours hear of it."""

from dataclasses import replace

import pytest
from test_relays import TWO_ENGINES, messages_of
from transfer_stages import failures

from converters.topology import Topology

SCENE = replace(TWO_ENGINES, transport="shared_memory")
GIVEN_UP = "refit.timeout_s"
CONNECTING = ("accept", "connected")
HEAD, TAIL = "TransferError: message ", " of engine worker 1 came with checksum "


@pytest.mark.parametrize("point", [*CONNECTING, "packed", "unpacked"])
def test_the_death_of_a_neighbour_is_heard_of(set_up, point):
    stage = set_up(SCENE)
    victim = stage.destinations[1]
    if point in CONNECTING:
        victim.break_at(point, 1, "kill")
        calls = stage.begin_connect()
    else:
        stage.connect()
        victim.break_at(point, 2, "kill")
        calls = stage.begin_refit(1)
    passed_on = 0 if point in CONNECTING else 2
    check_that_all_hear_of_it(stage, calls, victim, " is gone|does not answer", passed_on)


def test_a_neighbour_that_does_not_come_is_not_waited_for(set_up):
    stage = set_up(replace(SCENE, workers=1, topology=Topology.separate(2, 2, gpus_per_node=2)))
    rendezvous = stage.rendezvous()
    stage.destinations[1].close()
    found = failures(stage.begin([*stage.sources, stage.destinations[0]], "connect", rendezvous))
    assert "TransferError: engine worker 1 does not answer" in found[2]
    assert all(" failed: engine worker 1 does not answer" in error for error in found[:2])


def test_a_neighbour_that_stands_still_is_given_up(set_up):
    stage = set_up(replace(SCENE, timeout_s=1.5))
    stage.connect_in_time()
    victim = stage.destinations[1]
    victim.break_at("packed", 1, "stop")
    check_that_all_hear_of_it(stage, stage.begin_refit(1), victim, GIVEN_UP)


def check_that_all_hear_of_it(stage, calls, victim, news, passed_on=0):
    """All that wait for more of the victim, none by waiting if it is dead, and nothing stays behind.

    It may have `passed_on` so many messages, and whoever had no more to get of it has all that it needs.
    """
    call_of = dict(zip([*stage.sources, *stage.destinations], calls, strict=True))
    del call_of[victim]
    found = dict(zip(call_of, failures(call_of.values()), strict=True))
    assert news == GIVEN_UP or not [error for error in found.values() if GIVEN_UP in error]
    relayed = messages_of(stage.scene)[stage.destinations.index(victim)].relays_out
    needing = [rank for rank, messages in relayed.items() if len(messages) > passed_on]
    assert needing
    for rank in needing:
        assert found[stage.destinations[rank]].startswith("TransferError: ")
    assert {error.partition(":")[0] for error in found.values()} <= {"TransferError", ""}
    assert any(part in error for error in found.values() for part in news.split("|"))
    assert [rank.close() for rank in found] == [0] * len(found)


def test_a_source_that_fails_ends_the_passing_on(set_up):
    stage = set_up(SCENE)
    stage.connect()
    stage.sources[1].break_at("packed", 3, "fail")
    found = failures(stage.begin_refit(1))
    assert found[1] == "RuntimeError: on purpose"
    assert all(error.startswith("TransferError: ") for error in found[2:])
    assert sum("trainer rank 1 failed: on purpose" in error for error in found) >= 1
    assert stage.call([*stage.sources, *stage.destinations], "close") == [0] * 6
    stage.connect()
    stage.refit(1)
    assert stage.wrong(0) == [[]] * 4


def test_a_changed_bit_is_found_by_the_checksum_alone(set_up):
    stage = set_up(SCENE)
    stage.connect()
    stage.destinations[1].break_at("packed", 2, "corrupt")
    for rank in stage.destinations:
        # Its news comes back by way of others before its own error has ended the task that had it.
        rank.break_at("notified", 1, "linger")
    found = failures(stage.begin_refit(1))
    (receiver,) = [rank for rank, error in enumerate(found[2:]) if error.startswith(HEAD) and TAIL in error]
    assert f"engine worker {receiver} failed: message " in found[2 + 1]
    stage.call([*stage.sources, *stage.destinations], "close")
    stage.connect(with_checksum=False)
    stage.destinations[1].break_at("packed", 2, "corrupt")
    stage.refit(2)
    assert sum(map(len, stage.wrong(0))) == 1
