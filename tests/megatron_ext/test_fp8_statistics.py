"""Statistics of Transformer Engine's FP8 are pickles in a checkpoint: runs use their numbers, and run none of them."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from test_checkpoint import make_model, write_model

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext.checkpoint import checkpoint
from megatron_ext.checkpoint.fp8_statistics import require_readable, with_recipe


class MakesFolder:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@dataclass
class DelayedScaling:
    """Stands in for the recipe of Transformer Engine."""

    amax_history_len: int


def pickled(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


class WithStatistics(ColumnParallelLinear):
    """A linear layer that keeps its statistics as those of Transformer Engine do."""

    def get_extra_state(self) -> torch.Tensor:
        return pickled(self.statistics)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state is not None and state.numel():
            self.taken.append(pickle.loads(state.numpy().tobytes()))


def statistics(recipe: Any) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "scale_fwd": torch.arange(3.0),
        "amax_history_fwd": torch.arange(6.0).view(2, 3),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True, "local_recipes": [recipe]},
    }


def test_a_checkpoint_runs_no_code_in_its_statistics(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    (said,) = run_ranks(save_and_load, ParallelSizes(), source, tmp_path)
    assert not list(tmp_path.rglob("executed"))
    # Without FP8, and with a recipe that has none, nothing is taken; numbers are trained on all the same.
    assert said["none"] == said["tensorwise"] == ("", 0)
    refusal, taken = said["delayed"]
    assert taken == 0
    with pytest.raises(UserError, match=r"object decoder\.layers.*linear_qkv\._extra_state.* or no plain values"):
        raise UserError(refusal)


def save_and_load(rank: int, sizes: ParallelSizes, source: Path, scratch: Path) -> dict[str, tuple[str, int]]:
    """Recipe -> what a run with it says of a checkpoint that means harm, and how often statistics were taken."""
    model = make_model(rank, sizes, source)
    config, linear = model.chunks[0].config, model.chunks[0].module.decoder.layers[0].self_attention.linear_qkv
    linear.__class__ = WithStatistics
    linear.statistics = MakesFolder(scratch / "executed")
    checkpoint.save(model, scratch)
    weights = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    said = {}
    for recipe in ("none", "tensorwise", "delayed"):
        linear.taken = []
        for tensor in model.local_tensors().values():
            tensor.data.zero_()
        config.fp8, config.fp8_recipe = (None, "delayed") if recipe == "none" else ("hybrid", recipe)
        try:
            checkpoint.load(model, scratch)
        except UserError as error:
            said[recipe] = str(error), len(linear.taken)
        else:
            assert all(torch.equal(tensor, weights[name]) for name, tensor in model.local_tensors().items())
            said[recipe] = "", len(linear.taken)
    return said


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_delayed_scaling_goes_on_with_its_numbers_and_the_recipe_of_the_configuration(
    rows: int, tmp_path: Path
) -> None:
    stored = pickled(statistics(MakesFolder(tmp_path / "executed")))
    require_readable([stored])
    state = pickle.loads(with_recipe(stored, DelayedScaling(rows)).numpy().tobytes())
    assert not (tmp_path / "executed").exists()
    assert state["recipe"] == DelayedScaling(rows)
    assert torch.equal(state["scale_fwd"], torch.arange(3.0))
    expected = torch.cat([torch.arange(6.0).view(2, 3), torch.zeros(1, 3)])[:rows]
    assert torch.equal(state["amax_history_fwd"], expected)
    assert state["extra_fp8_variables"] == {"num_gemms": 1, "fp8_checkpoint": True}


def test_none_and_those_of_another_recipe_are_none() -> None:
    other = {"recipe": DelayedScaling(1), "extra_fp8_variables": {"num_gemms": 1}}
    for stored in (torch.empty(0, dtype=torch.uint8), pickled(other)):
        assert with_recipe(stored, DelayedScaling(1)).numel() == 0
    require_readable([None, {"a": torch.empty(0, dtype=torch.uint8)}])


def evil_tensor(folder: Path) -> bytes:
    """A pickled tensor whose values are a pickle that makes a folder."""

    class Storage:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (pickle.dumps(MakesFolder(folder)),)

    return pickle.dumps({"scale_fwd": Storage(), "extra_fp8_variables": {}})


def test_what_is_no_statistics_is_refused_and_not_run(tmp_path: Path) -> None:
    inner = torch.frombuffer(bytearray(evil_tensor(tmp_path / "executed")), dtype=torch.uint8)
    for stored in (
        inner,
        pickled(MakesFolder(tmp_path / "executed")),
        pickled({"scale_fwd": torch.ones(1)}),
        torch.arange(9, dtype=torch.uint8),
        torch.ones(3),
        b"bytes",
    ):
        with pytest.raises(pickle.UnpicklingError):
            require_readable([stored])
    assert not (tmp_path / "executed").exists()
