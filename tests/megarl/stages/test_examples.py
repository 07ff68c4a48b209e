"""Each type that carries a step's data shows an example, and the example works."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from megarl.algorithms.advantages.estimator import Input
from megarl.cluster.trainer.batch import Batch
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import RunLengthArray, StoredArray
from megarl.rewards import Score
from megarl.rollout.protocol import Request
from megarl.stages.fields import Field
from megatron_ext.packing.packing import RaggedBatch

CARRIERS = (
    *(Prompt, Request, Turn, Trajectory, PromptGroup, Score, RaggedBatch, Field),
    *(Batch, RunLengthArray, StoredArray, Input),
)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_carrier_has_an_example_that_makes_one(carrier) -> None:
    _, _, example = (inspect.getdoc(carrier) or "").partition("Example: ")
    made = eval(example.partition("\n\n")[0], {**vars(sys.modules[carrier.__module__]), "torch": torch})
    assert isinstance(made, carrier)


def test_the_types_between_a_prompt_and_the_loss_are_those_of_the_page() -> None:
    _, _, page = (Path(__file__).parents[3] / "docs/concepts.md").read_text().partition("\nEight types carry")
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+)\.py` \|", page.partition("\n\nFunctions in between")[0], re.MULTILINE)
    assert len(rows) == 8
    for name, file in rows:
        module = importlib.import_module(file.replace("/", "."))
        assert getattr(module, name).__module__ == module.__name__, name
