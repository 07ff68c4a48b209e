"""Moments that Transformer Engine's Adam keeps in few bits are saved and read without copies of all of them."""

from pathlib import Path
from typing import Any

import torch
from launch import run_ranks
from test_checkpoint import make_model, train, write_model
from torch import Tensor

from converters.formats.torch_dist import TorchDistCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext import compat
from megatron_ext.optimizer.optimizer_shards import PREFIX

DP2 = ParallelSizes(world_size=2)
SCALE = 4.0


class FusedAdam:
    """The state of an Adam as Transformer Engine keeps it, and hands it out: first moments in bf16, second in fp16.

    With a `recipe` of FP8 both are in bf16, and megatron-core keeps the main parameters.
    """

    def __init__(self, adam: torch.optim.Adam, *, recipe: bool) -> None:
        self.param_groups, self.state = adam.param_groups, {}
        self.name_to_dtype_map = {
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.float16,
            "master_param": torch.float32,
        }
        self.copies = 0
        """How many were made of what is in bf16."""
        for main, state in adam.state.items():
            self.state[main] = {
                "exp_avg": state["exp_avg"].bfloat16(),
                "exp_avg_sq": state["exp_avg_sq"].bfloat16() if recipe else (state["exp_avg_sq"] / SCALE).half(),
                **({} if recipe else {"master_param": main.detach()}),
            }

    def get_unscaled_state(self, main: Tensor, name: str) -> Tensor:
        kept = self.state[main][name]
        if kept.dtype == torch.float32:
            return kept
        self.copies += kept.dtype == torch.bfloat16
        return kept.float() * (SCALE if kept.dtype == torch.float16 else 1.0)

    def set_scaled_state(self, main: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype == torch.float32
        kept = self.state[main][name]
        kept.copy_(unscaled / (SCALE if kept.dtype == torch.float16 else 1.0))


def with_fused_adam(model: Any, *, recipe: bool = False) -> Any:
    compat.prime_optimizer_state(model.optimizer)
    for part in compat.parts(model.optimizer):
        part.optimizer = FusedAdam(part.optimizer, recipe=recipe)
        part.config.use_precision_aware_optimizer = True
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = not recipe
    return model


def moments(model: Any) -> dict[str, list[Tensor]]:
    """Moments of this rank, as they are kept."""
    found: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": []}
    for part in compat.parts(model.optimizer):
        for main in (main for group in part.optimizer.param_groups for main in group["params"]):
            for name, kept in found.items():
                kept.append(part.optimizer.state[main][name].clone())
    return found


def saved_and_read(rank: int, sizes: ParallelSizes, folder: Path, root: Path) -> dict[str, Any]:
    """Moments of a model that keeps them so and one that does not, and those that were read by either from the other's.

    Also how many copies were made.
    """
    from megatron_ext.checkpoint import checkpoint

    models = {
        "fused": with_fused_adam(trained(rank, sizes, folder)),
        "recipe": with_fused_adam(trained(rank, sizes, folder), recipe=True),
        "plain": trained(rank, sizes, folder),
    }
    for name, model in models.items():
        (root / name).mkdir(exist_ok=True)
        checkpoint.save(model, root / name)
    models["fused from fused"] = with_fused_adam(new(rank, sizes, folder))
    models["fused from plain"] = with_fused_adam(new(rank, sizes, folder))
    models["recipe from recipe"] = with_fused_adam(new(rank, sizes, folder), recipe=True)
    models["plain from fused"] = new(rank, sizes, folder)
    for name, model in models.items():
        if " from " in name:
            checkpoint.load(model, root / name.rpartition(" ")[2])
    adams = [
        part.optimizer for name in models if name.startswith("fused") for part in compat.parts(models[name].optimizer)
    ]
    return {"copies": sum(adam.copies for adam in adams)} | {name: moments(each) for name, each in models.items()}


def new(rank: int, sizes: ParallelSizes, folder: Path) -> Any:
    return make_model(rank, sizes, folder, dtype=torch.bfloat16)


def trained(rank: int, sizes: ParallelSizes, folder: Path) -> Any:
    model = new(rank, sizes, folder)
    train(model, range(1))
    return model


def test_moments_in_bf16_are_written_and_read_where_they_are(tmp_path: Path) -> None:
    ranks = run_ranks(saved_and_read, DP2, write_model(tmp_path), tmp_path)
    for found in ranks:
        assert found["copies"] == 0
        fused, plain = found["fused"], found["plain"]
        assert any(each.any() for each in fused["exp_avg"])
        for name, kept in fused.items():
            assert all(map(torch.equal, found["fused from fused"][name], kept)), name
            assert all(map(torch.equal, found["recipe from recipe"][name], found["recipe"][name])), name
        assert all(map(torch.equal, found["plain from fused"]["exp_avg"], (each.float() for each in fused["exp_avg"])))
        rounded = (each.bfloat16() for each in plain["exp_avg"])
        assert all(map(torch.equal, found["fused from plain"]["exp_avg"], rounded))
    stored = TorchDistCheckpoint(tmp_path / "fused").contents.tensors
    types = {key.split(".")[2]: tensor.dtype for key, tensor in stored.items() if key.startswith(PREFIX)}
    assert types == {"param": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}
