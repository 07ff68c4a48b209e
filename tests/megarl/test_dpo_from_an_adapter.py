"""Pairs on an adapter that goes on: the reference is the model without it, and the run says so."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megarl.dpo
from megarl.config.compose import compose
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model


class BegunError(Exception):
    """A run that would start its processes now."""


@contextmanager
def beginning(*_args: object, **_options: object):
    raise BegunError
    yield


def write_adapter(model: Path, folder: Path) -> None:
    """Write an adapter of the queries of a model to a folder, which is made."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    weights = {name: each for name, each in load_file(model / "model.safetensors").items() if "q_proj" in name}
    factors = {}
    for name, (out, inner) in ((name, each.shape) for name, each in weights.items()):
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{layer}.lora_A.weight": torch.zeros(4, inner), f"{layer}.lora_B.weight": torch.zeros(out, 4)}
    save_file(factors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_reference_is_named_where_the_run_begins_with_an_adapter(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model("qwen3", tmp_path / "model", fields={"num_hidden_layers": 2})
    adapter = tmp_path / "adapter"
    write_adapter(model, adapter)
    pairs = write_arithmetic(tmp_path / "data", held_out=8).pairs_eval
    overrides = [
        *(f"model.path={model}", f"output_dir={tmp_path / 'run'}", "megatron.expert_model_parallel_size=1"),
        *(f"preference.train_files=[{pairs}]", "preference.eval_files=[]"),
        f"lora.path={adapter}" if goes_on else "lora.rank=4",
    ]
    monkeypatch.setattr(megarl.dpo, "open_training", beginning)
    with pytest.raises(BegunError):
        megarl.dpo.dpo(compose("quickstart_dpo", overrides))
    assert (
        f"the reference is the model without the adapter in lora.path={adapter}" in capsys.readouterr().err
    ) is goes_on
