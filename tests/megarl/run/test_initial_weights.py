"""A run that resumes finds the weights again that it began with: those of its reference, or under its adapter."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from converters.errors import UserError
from converters.hf_to_megatron import convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.checkpoints import Checkpoints
from megarl.run.opening import RunSetup
from megarl.schema import MegarlConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model, of a copy elsewhere, of its conversion, and of a model that only has its shapes."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model("qwen3", folder / "first")
    write_tiny_model("qwen3", folder / "other", seed=1)
    shutil.copytree(folder / "first", folder / "moved")
    convert_checkpoint(
        folder / "first",
        folder / "megatron",
        ParallelSizes(),
        dtype="keep",
        vocabulary_multiple=1,
        padded_vocabulary=None,
        workers=1,
        progress=lambda *_: None,
    )
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> MegarlConfig:
    made = MegarlConfig()
    made.output_dir, made.model.path, made.model.dtype = str(tmp_path / "run"), str(models / "first"), "fp32"
    return made


def save(setup: RunSetup) -> None:
    with Checkpoints(setup.config, setup.command, {}) as checkpoints:
        checkpoints.save(1, lambda _write: setup.state)


def at(config: MegarlConfig, **model: str | None) -> MegarlConfig:
    return replace(config, model=replace(config.model, **model))


def test_a_run_resumes_from_the_weights_that_it_began_with_alone(config: MegarlConfig, models: Path) -> None:
    save(RunSetup.read(config, "dpo"))
    for same in ({"path": str(models / "moved")}, {"megatron_checkpoint": str(models / "megatron")}):
        assert RunSetup.read(at(config, **same), "dpo").step == 1
    with pytest.raises(
        UserError, match=r"began with other weights than those in model\.path=.*other: set it as it was"
    ):
        RunSetup.read(at(config, path=str(models / "other")), "dpo")
    other = {"path": str(models / "other"), "megatron_checkpoint": str(models / "megatron")}
    assert RunSetup.read(at(config, **other), "dpo").step == 1


def test_a_model_of_implicit_rewards_keeps_its_reference(config: MegarlConfig, models: Path) -> None:
    config.algorithm.advantage = "prime"
    config.implicit_reward_model.path = str(models / "moved")
    save(RunSetup.read(config, "train"))
    Path(config.output_dir, "checkpoints/iter_0000001/implicit_reward_model").mkdir()
    config.implicit_reward_model.path = None
    assert RunSetup.read(config, "train").step == 1
    config.implicit_reward_model.path = str(models / "other")
    with pytest.raises(UserError, match=r"other weights than those in implicit_reward_model\.path=.*other"):
        RunSetup.read(config, "train")


def test_a_checkpoint_of_an_earlier_version_says_nothing_about_it(config: MegarlConfig, models: Path) -> None:
    save(replace(RunSetup.read(config, "dpo"), initial_weights={}))
    assert RunSetup.read(at(config, path=str(models / "other")), "dpo").step == 1


def test_a_critic_that_the_checkpoint_does_not_have_is_asked_for_before_anything_starts(config: MegarlConfig) -> None:
    save(RunSetup.read(config, "train"))
    config.algorithm.advantage = "gae"
    with pytest.raises(
        UserError, match=r"iter_0000001 holds no critic, .*: set algorithm.advantage as it was, or begin"
    ):
        RunSetup.read(config, "train")
