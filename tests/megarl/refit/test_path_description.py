"""A direct path says how much memory of workers the values of blocks take that cuts go through."""

from megarl.refit.direct import staging_note


def test_values_of_cut_blocks_are_counted():
    assert staging_note(0) == staging_note(10**9 - 1) == ""
    assert staging_note(27 * 10**9) == (
        "; cuts of the trainer go through blocks, whose values take 27 GB of an engine's worker. Cut over fewer ranks"
        " to take less; experts are cut over megatron.expert_tensor_parallel_size"
    )
