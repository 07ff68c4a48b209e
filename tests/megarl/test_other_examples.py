"""Training on examples goes on with the same ones alone, although a file of others may be as long."""

from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.config.compose import compose
from megarl.data import PromptSampler, load_conversations, load_pairs
from megarl.data.sampler import digest_of
from megarl.dpo import dpo
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import make_tokenizer, write_tiny_model
from megarl.reward_model import train_reward_model
from megarl.run.checkpoints import checkpoints_folder
from megarl.run.preferences import digest_of_pairs
from megarl.schema import MegarlConfig
from megarl.sft import sft
from megarl.spin import last_exchange, spin
from megatron_ext.checkpoint import checkpoint_folder

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


def drawn_from(command: str, config: MegarlConfig) -> PromptSampler:
    """A sampler of the examples of a configuration."""
    tokenizer, limit, preference = make_tokenizer(), config.loop.max_tokens_per_micro_batch, config.preference
    if command in ("dpo", "reward_model"):
        pairs = load_pairs(preference.train_files, tokenizer, preference, limit)
        size, digest = len(pairs), digest_of_pairs(pairs)
    else:
        files = config.sft.train_files if command == "sft" else preference.train_files
        conversations = load_conversations(files, tokenizer, "messages", limit)
        exchanges = [last_exchange(each) if command == "spin" else (each.token_ids,) for each in conversations]
        size, digest = len(conversations), digest_of(part for each in exchanges for part in each)
    return PromptSampler(size, config.data.shuffle, config.loop.seed, digest)


def save(command: str, config: MegarlConfig) -> None:
    """Write what the controller has in a checkpoint of the first step."""
    sampler = drawn_from(command, config).state_dict()
    state = {"step": 1, "command": command.replace("_", "-"), "sampler": sampler, "waiting": []}
    root = checkpoints_folder(config)
    checkpoint_folder.begin(root, 1)
    checkpoint_folder.commit(root, 1, state, keep=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_other_examples_are_refused_before_anything_starts(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = COMMANDS[command]
    monkeypatch.setattr(import_module(run.__module__), "open_training", beginning)
    save(command, config := configuration(command, model, tmp_path, seed=0))
    with pytest.raises(BegunError):
        run(config)
    with pytest.raises(UserError, match="are not those of this run, although there are as many"):
        run(configuration(command, model, tmp_path, seed=1))
