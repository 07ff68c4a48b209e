"""Training on examples goes on with the same ones alone, although a file of others may be as long."""

from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.dpo import dpo
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.reward_model import train_reward_model
from megarl.run import opening
from megarl.run.checkpoints import Checkpoint
from megarl.schema import MegarlConfig
from megarl.sft import sft
from megarl.spin import spin

COMMANDS = {"sft": sft, "dpo": dpo, "reward_model": train_reward_model, "spin": spin}


class BegunError(Exception):
    """A run that would start its processes now."""


@contextmanager
def beginning(*_args: object, **_options: object):
    raise BegunError
    yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


def configuration(command: str, model: Path, folder: Path, seed: int) -> MegarlConfig:
    files = write_arithmetic(folder / f"data_{seed}", seed=seed, held_out=8)
    conversations = files.sft_eval if command in ("sft", "spin") else files.pairs_eval
    return compose(
        f"quickstart_{command}",
        [
            *(f"model.path={model}", f"output_dir={folder / 'run'}", "megatron.expert_model_parallel_size=1"),
            f"{'sft' if command == 'sft' else 'preference'}.train_files=[{conversations}]",
            f"{'sft' if command == 'sft' else 'preference'}.eval_files=[]",
            "sft.stop_at_exact_match=null",
        ],
    )


def saved_by(run: Callable[[MegarlConfig], None], config: MegarlConfig, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The checkpoint of a run before its first step."""
    samplers, make = [], opening.PromptSampler
    with monkeypatch.context() as patch:
        patch.setattr(opening, "PromptSampler", lambda *args: samplers.append(make(*args)) or samplers[-1])
        with pytest.raises(BegunError):
            run(config)
    (sampler,) = samplers
    return Checkpoint(Path("saved"), {"step": 1, "batches": {"sampler": sampler.state_dict()}})


@pytest.mark.parametrize("command", COMMANDS)
def test_other_examples_are_refused_before_anything_starts(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = COMMANDS[command]
    monkeypatch.setattr(import_module(run.__module__), "open_training", beginning)
    checkpoint = saved_by(run, configuration(command, model, tmp_path, seed=0), monkeypatch)
    monkeypatch.setattr(opening, "latest_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr(opening, "check_trained_alike", lambda *_: None)
    monkeypatch.setattr(opening, "read_waiting", lambda *_: [])
    with pytest.raises(BegunError):
        run(configuration(command, model, tmp_path, seed=0))
    with pytest.raises(UserError, match="are not those of this run, although there are as many"):
        run(configuration(command, model, tmp_path, seed=1))
