"""A direct path says what slows it or takes memory: machines without ports, and cuts that go through blocks."""

from megarl.refit.direct import restriction, staging_note


def test_where_all_have_a_port_nothing_is_said():
    assert restriction([True, True], [True]) == ""


def test_ranks_and_workers_without_a_port_are_named():
    assert restriction([True, True], [False, True]) == (
        ", but by way of sockets: no port of InfiniBand, RoCE or EFA is seen by engine worker 0"
        " (/dev/infiniband). If the machines have ports, show them to the containers; else refit.delta=true lets"
        " changes alone travel"
    )
    found = restriction([False] * 3, [True] + [False] * 5)
    assert " by trainer rank 0, trainer rank 1, trainer rank 2, engine worker 1 and 4 others (" in found


def test_values_of_cut_blocks_are_counted():
    assert staging_note(0) == ""
    assert staging_note(27 * 10**9) == (
        "; cuts of the trainer go through blocks, whose values take 27 GB of an engine's worker. Cut over fewer ranks"
        " to take less; experts are cut over megatron.expert_tensor_parallel_size"
    )
