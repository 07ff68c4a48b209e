"""Engines in MXFP8 that start without weights: their scales are numbers, whatever lay in memory."""

import pytest
import torch

from converters.architectures import read_architecture
from converters.number_formats import MXFP8
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.rollout.vllm.kind import VLLM


def _fill_new_memory(fill):
    """New bytes are 255, which is NaN as a scale."""
    torch.use_deterministic_algorithms(fill, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return torch.empty(2, dtype=torch.uint8).tolist() == [255, 255]


def _scales(rank):
    scales = {name: each for name, each in rank.model.named_parameters() if name.endswith("weight_scale")}
    return {name: each.unique().tolist() for name, each in scales.items()}


@pytest.mark.long
def test_scales_that_nobody_has_written_are_one(ranks, tiny_config):
    folder, config = tiny_config("deepseek_v3", **IN_BLOCKS["deepseek_v3"])
    given = VLLM.quantised({}, MXFP8, read_architecture(config)) | VLLM.without_weights
    assert ranks.alone(_fill_new_memory, True)
    try:
        (scales,) = ranks(_scales, folder, given)
    finally:
        ranks.alone(_fill_new_memory, False)
    kinds = {name.rpartition(".")[2] for name in scales}
    assert kinds == {"weight_scale", "w13_weight_scale", "w2_weight_scale"}
    assert [name for name, values in scales.items() if values != [127]] == []
