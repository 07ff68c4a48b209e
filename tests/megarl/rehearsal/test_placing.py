"""A job is placed without its cluster as it would be with it."""

import pytest
import torch

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megarl.config.compose import compose
from megarl.rehearsal.placing import place_job, say_placement
from megarl.rehearsal.trainer_rank import RankModel
from megatron_ext.options.options import MegatronOptions

TRAINED = RankModel("trainer", {}, MegatronOptions(ParallelSizes(256, 8, 8, None, 1, 32, 1), torch.bfloat16))


def test_engines_over_two_machines_and_ranks_have_their_own() -> None:
    config = compose("grpo_deepseek_v3", ["model.path=m", "output_dir=o"])
    placement = place_job(config, [TRAINED], gpus_per_node=8, nodes=None)
    assert say_placement(placement, 8) == "48 machines of 8 GPUs: trainer on 32, engine on 16"


def test_a_cluster_that_is_too_small_is_said() -> None:
    config = compose("grpo_deepseek_v3", ["model.path=m", "output_dir=o"])
    with pytest.raises(UserError, match="need 384 GPUs; there are 376"):
        place_job(config, [TRAINED], gpus_per_node=8, nodes=47)
