"""A run that resumes says which settings are others than those that its checkpoint was written with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from converters.architectures import read_architecture
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.changed_settings import changed_settings
from megarl.run.checkpoints import Checkpoint, Checkpoints
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig


def test_a_run_that_resumes_says_what_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MegarlConfig()
    config.output_dir, config.model.dtype = str(tmp_path / "run"), "fp32"
    config.model.path = str(write_tiny_model("qwen3", tmp_path / "model"))
    config.megatron["lr"] = 1e-6
    setup = RunSetup.read(config, "dpo")
    with Checkpoints(config, "dpo", {}) as checkpoints:
        checkpoints.save(1, lambda _write: setup.state)
    capsys.readouterr()
    config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    RunSetup.read(config, "dpo")
    assert "settings" not in capsys.readouterr().err
    config.preference.beta, config.megatron = 0.5, {"lr": 5e-7, "clip_grad": 0.5}
    RunSetup.read(config, "dpo")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "settings that have changed since the checkpoint of step 1: megatron.clip_grad unset -> 0.5,"
        " megatron.lr 1e-06 -> 5e-07, preference.beta 0.1 -> 0.5"
    )


def test_an_edited_config_json_is_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MegarlConfig()
    config.output_dir, config.model.dtype = str(tmp_path / "run"), "fp32"
    folder = write_tiny_model("gemma2", tmp_path / "model")
    config.model.path = str(folder)
    setup = RunSetup.read(config, "sft")
    with Checkpoints(config, "sft", {}) as checkpoints:
        checkpoints.save(1, lambda _write: setup.state)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"final_logit_softcapping": 30.0, "transformers_version": "9.9.9"}
    (folder / "config.json").write_text(json.dumps(fields))
    config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    RunSetup.read(config, "sft")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "settings that have changed since the checkpoint of step 1: config.json's output_softcap 3.0 -> 30.0"
    )


def test_a_key_that_an_earlier_version_did_not_have_had_its_default(tmp_path: Path) -> None:
    config = MegarlConfig()
    earlier = Checkpoint(tmp_path, {"step": 1, "config": {"loop": {"steps": config.loop.steps}}})
    model = read_architecture(json.loads((write_tiny_model("qwen3", tmp_path / "model") / "config.json").read_text()))
    assert changed_settings(earlier, config, model) == []
    config.loop.samples_per_prompt += 1
    assert len(changed_settings(earlier, config, model)) == 1
    assert changed_settings(Checkpoint(tmp_path, {"step": 1}), config, model) == []
