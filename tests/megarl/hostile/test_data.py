"""Parquet files, prompts, chat templates and reward files."""

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from megarl.data import load_conversations, load_pairs, load_prompts
from megarl.rewards.registry import load_reward
from megarl.schema import DataConfig, PreferenceConfig

CHAT = [{"role": "user", "content": "1+1="}]
TAKEN = "def score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"


def row(**fields):
    return {"data_source": "sums", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}, **fields}


def said(content):
    return [{"role": "user", "content": content}]


ROWS = {
    "no column": {"prompt": CHAT},
    "no prompt": row(prompt=None),
    "no content": row(prompt=said(None)),
    "no role": row(prompt=[{"role": None, "content": "1"}]),
    "empty prompt": row(prompt=[]),
    "text for a prompt": row(prompt="1+1="),
    "number for a prompt": row(prompt=5),
    "a prompt of 1 MB": row(prompt=said("1" * 10**6)),
    "number for a source": row(data_source=5),
    "no reward": row(reward_model=None),
    "no truth": row(reward_model={"ground_truth": None}),
    "list for extra": row(extra_info=[1]),
}
TEMPLATES = {
    "raises": "{{ raise_exception('no way') }}",
    "is none": "{% for %}",
    "names nothing": "{{ nope.nope.nope }}",
    "says nothing": "",
    "reaches out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "adds what cannot be": "{{ 1 + 'a' }}",
    "divides by nothing": "{{ 1 // 0 }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
REWARDS = {
    "fails": "1/0\n",
    "is no Python": "def (:\n",
    "has no such name": "other = 1\n",
    "has no function of the name": "score = 5\n",
    "takes too little": "def score(x): return 1\n",
    "ends the program": "raise SystemExit(3)\n",
    "needs what is missing": "import nope_nope\n" + TAKEN,
    "is no text": b'a = "\xff"\n' + TAKEN.encode(),
    "has a zero byte": b"a = 1\0\n" + TAKEN.encode(),
}


@pytest.fixture(scope="module")
def tokenizer(hostile_model):
    return AutoTokenizer.from_pretrained(hostile_model)


@pytest.fixture
def judge(tokenizer, refusal):
    return lambda path: refusal(load_prompts, [path], tokenizer, DataConfig())


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "data.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return path

    return write


def test_what_is_right_is_taken(judge, written):
    assert judge(written(row(), row())) is None


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_is_no_prompt_is_refused(judge, written, name):
    assert "data.parquet" in judge(written(ROWS[name]))


@pytest.mark.parametrize("name", ["zero", "missing", "folder", "loop", "pipe", "text", "magic"])
def test_a_file_that_is_no_table_is_refused(judge, tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "loop":
        path.symlink_to(path)
    elif name == "pipe":
        os.mkfifo(path)
    elif name != "missing":
        path.write_bytes({"zero": b"", "text": b"a,b\n", "magic": b"PAR1" + bytes(99) + b"\xff\xff\xff\x7fPAR1"}[name])
    assert name in judge(path)


@pytest.mark.parametrize("seed", range(40))
def test_a_file_with_wrong_bytes_is_taken_or_refused(judge, written, seed):
    draw = random.Random(seed)
    path = written(*[row()] * 4)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 8])):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content[: draw.choice([len(content), len(content) - 40])])
    judge(path)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_makes_no_prompt_is_refused(judge, tokenizer, written, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    assert "data.parquet" in judge(written(row()))


def test_an_absent_column_is_told_with_the_setting_that_names_it(tokenizer, written, refusal):
    path = written({"question": CHAT, "chosen": "2"})
    assert "or name the right one in data.prompt_column" in refusal(load_prompts, [path], tokenizer, DataConfig())
    sentence = refusal(load_pairs, [path], tokenizer, PreferenceConfig(), 64)
    assert "or name the right ones in preference.prompt_column and preference.rejected_column; docs" in sentence
    for group in ("sft", "preference"):
        sentence = refusal(load_conversations, [path], tokenizer, "messages", 64, group)
        assert (
            f"'question', 'chosen': rename one of them, or name the right one in {group}.messages_column;" in sentence
        )


def test_a_template_that_never_ends_is_ended(judge, tokenizer, written, monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    monkeypatch.setattr(tokenizer, "chat_template", endless)
    monkeypatch.setattr("megarl.data.chat._RENDER_LIMIT_S", 0.3)
    assert "is not done with these messages" in judge(written(row()))


def test_a_huge_text_is_refused_before_it_is_tokenised(tokenizer, written, refusal, monkeypatch):
    """Tokenised, a text of 50 MB takes 18 GB; here it ends the test that it is tokenised at all."""
    path = written(
        row(prompt=said("1+" * 10**6), messages=[*said("1+" * 10**6), {"role": "assistant", "content": "2"}])
    )
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    assert "more than data.max_prompt_tokens=1024 can hold" in refusal(load_prompts, [path], tokenizer, DataConfig())
    assert "more than 64 tokens can hold" in refusal(load_conversations, [path], tokenizer, "messages", 64)


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_file_that_gives_no_function_is_refused(refusal, tmp_path, name):
    path = tmp_path / "reward.py"
    content = REWARDS[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{path}:score" in refusal(load_reward, f"{path}:score")


@pytest.mark.parametrize("spec", ["/nonexistent.py:score", "/tmp:score", "nope", "a:b:c", "/etc/passwd:score", ":", ""])
def test_a_reward_that_is_not_there_is_refused(refusal, spec):
    assert refusal(load_reward, spec)
