"""Examples that a run reads end where responses of its model end."""

import json
import shutil
from importlib import import_module

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.compose import compose
from megarl.models.ends import stop_token_ids
from megarl.models.policy import read_model
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.examples import read_conversations
from megarl.run.opening import RunSetup
from megarl.run.preferences import read_pairs
from megarl.schema import ModelConfig

WITHOUT_END = (
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
ASKED, RIGHT = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


@pytest.fixture
def files(tmp_path):
    """A conversation, and a pair."""
    row = {"messages": [ASKED, RIGHT], "prompt": [ASKED], "chosen": "2", "rejected": "3"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "examples.parquet")
    return [str(tmp_path / "examples.parquet")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GLM-4.5, tiny, with a template that writes no end."""
    folder = write_tiny_model("glm4_moe", tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(WITHOUT_END)
    return folder


def setup_of(command, folder, run, *overrides):
    paths = (f"model.path={folder}", f"output_dir={run}", "megatron.expert_model_parallel_size=1")
    return RunSetup.read(compose(f"quickstart_{command}", [*paths, *overrides]), command.replace("_", "-"))


def said(setup, conversation):
    tokens = zip(conversation.token_ids, conversation.mask, strict=True)
    return setup.model.tokenizer.decode([token for token, learned in tokens if learned])


def end_at(folder, tokenizer, *tokens):
    ends = tokenizer.convert_tokens_to_ids(list(tokens))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_p": 0.5}))


@pytest.mark.parametrize("command", ["sft", "spin", "dpo", "reward_model"])
def test_a_turn_ends_with_the_next_role_where_responses_do(command, folder, files, tmp_path):
    overrides = (f"preference.train_files={files}", "preference.eval_files=[]")
    end_at(folder, setup_of(command, folder, tmp_path / "run").model.tokenizer, "<end>", "<user>")
    setup = setup_of(command, folder, tmp_path / "run", *overrides)
    if command in ("sft", "spin"):
        (conversation,) = read_conversations(setup, files, "messages", "sft")
    else:
        conversation = read_pairs(setup)[0][0].chosen
    assert said(setup, conversation) == "2<user>"


@pytest.fixture
def base(folder, tmp_path):
    """A base model: its responses end with <end>, and the turns of its chat template with <assistant>."""
    shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(
        "{%- for m in messages -%}<user>{{ m.content }}<assistant> {%- endfor -%}"
        "{%- if add_generation_prompt -%}<user>{%- endif -%}"
    )
    return tmp_path / "base"


class OpenedError(Exception):
    """Holds the setup that a command goes on with when it has read its examples."""


def opened(command, folder, files, run, monkeypatch, *overrides):
    """The setup that a command opens processes with."""

    def open_training(setup, **_):
        raise OpenedError(setup)

    program = import_module(f"megarl.{command}")
    monkeypatch.setattr(program, "open_training", open_training)
    group = "sft" if command == "sft" else "preference"
    paths = (f"{group}.train_files={files}", f"{group}.eval_files={files}", f"{group}.messages_column=messages")
    config = setup_of(command, folder, run, *paths, *overrides).config
    with pytest.raises(OpenedError) as error:
        getattr(program, "train_reward_model" if command == "reward_model" else command)(config)
    return error.value.args[0]


class Trainer:
    """Exports what lies beside the weights."""

    def export(self, folder, copy_from):
        folder.mkdir(parents=True)
        for name in ("config.json", "generation_config.json"):
            if (copy_from / name).exists():
                shutil.copyfile(copy_from / name, folder / name)


@pytest.mark.parametrize("command", ["sft", "spin", "dpo"])
def test_an_end_that_the_model_does_not_name_is_said_and_exported(command, base, files, tmp_path, monkeypatch, capsys):
    tokenizer = read_model(ModelConfig(str(base)), []).tokenizer
    end, new = tokenizer.convert_tokens_to_ids(["<end>", "<assistant>"])
    end_at(base, tokenizer, "<end>")
    # A stop token of the run alone is none of the model that it writes.
    for overrides in ((), (f"rollout.stop_token_ids=[{new}]",)):
        setup = opened(command, base, files, tmp_path / "run", monkeypatch, *overrides)
        said = capsys.readouterr().err
        assert f"turns of the examples end with <assistant> ({new}), at which no response of {base} ends" in said
        assert setup.model.stop_token_ids == tuple(sorted([end, new]))
        assert setup.learned_ends == (new,)
    setup.export_policy(Trainer(), 1)
    export = tmp_path / "run" / "huggingface"
    assert json.loads((export / "generation_config.json").read_text()) == {"eos_token_id": [end, new], "top_p": 0.5}
    assert stop_token_ids(export, tokenizer) == tuple(sorted([end, new]))


def test_ends_of_config_json_are_kept_where_there_is_no_other_file(base, files, tmp_path, monkeypatch):
    tokenizer = read_model(ModelConfig(str(base)), []).tokenizer
    other, new = tokenizer.convert_tokens_to_ids(["9", "<assistant>"])
    (base / "generation_config.json").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": other}))
    opened("sft", base, files, tmp_path / "run", monkeypatch).export_policy(Trainer(), 1)
    export = tmp_path / "run" / "huggingface"
    assert json.loads((export / "generation_config.json").read_text()) == {"eos_token_id": [other, new]}


def test_an_end_that_the_tokenizer_alone_names_is_exported(base, files, tmp_path, monkeypatch, capsys):
    tokenizer = read_model(ModelConfig(str(base)), []).tokenizer
    end, new = tokenizer.convert_tokens_to_ids(["<end>", "<assistant>"])
    end_at(base, tokenizer, "<end>")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<assistant>"}))
    opened("sft", base, files, tmp_path / "run", monkeypatch).export_policy(Trainer(), 1)
    assert "warning" not in capsys.readouterr().err
    export = tmp_path / "run" / "huggingface"
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == [end, new]


@pytest.mark.parametrize(("command", "ends"), [("sft", ["<end>", "<assistant>"]), ("reward_model", ["<end>"])])
def test_nothing_is_said_of_ends_that_are_named_and_of_a_model_that_gives_scores(
    command, ends, base, files, tmp_path, monkeypatch, capsys
):
    end_at(base, read_model(ModelConfig(str(base)), []).tokenizer, *ends)
    before = (base / "generation_config.json").read_text()
    setup = opened(command, base, files, tmp_path / "run", monkeypatch)
    assert "warning" not in capsys.readouterr().err
    setup.export_policy(Trainer(), 1)
    assert (tmp_path / "run" / "huggingface" / "generation_config.json").read_text() == before
