"""Examples that a run reads end where responses of its model end."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.compose import compose
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.examples import read_conversations
from megarl.run.opening import RunSetup
from megarl.run.preferences import read_pairs

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
