"""Each type that carries a step's data shows an example, and the example works."""

import inspect
import sys

import pytest
import torch

from megarl.algorithms.advantages.estimator import Input, ScoredResponses
from megarl.algorithms.policy_losses.policy_loss import Tokens
from megarl.cluster.batch import Batch
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import Runs, Stored
from megarl.rewards import RewardSample, Score
from megarl.rollout.protocol import Request
from megarl.stages.fields import Field
from megatron_ext.packing import RaggedBatch

CARRIERS = (
    *(Prompt, Request, Turn, Trajectory, PromptGroup, RewardSample, Score, RaggedBatch, Field),
    *(Batch, Runs, Stored, ScoredResponses, Input, Tokens),
)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_carrier_has_an_example_that_makes_one(carrier) -> None:
    _, _, example = (inspect.getdoc(carrier) or "").partition("Example: ")
    made = eval(example.partition("\n\n")[0], {**vars(sys.modules[carrier.__module__]), "torch": torch})
    assert isinstance(made, carrier)
