import dataclasses
import sys
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.errors import UserError
from megarl.data import load_prompts
from megarl.data.chat import check_messages, render
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.schema import DataConfig


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def row(question="1+2=", **fields):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7},
        **fields,
    }


def write(path: Path, rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_prompt_is_the_rendered_chat_with_the_generation_prompt(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "1+"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "="}]
    file = write(tmp_path / "a.parquet", [row(), row(prompt=chat)])
    loaded = load_prompts([file], tokenizer, DataConfig())
    assert [tokenizer.decode(list(prompt.token_ids)) for prompt in loaded.prompts] == [
        "<user>1+2=<assistant>",
        "<user>1+<assistant>2<end><user>=<assistant>",
    ]
    first = loaded.prompts[0]
    assert first.where.startswith("row 0 (from 0) of ")
    assert (first.index, first.data_source, first.ground_truth, first.extra_info) == (0, "sums", "3", {"index": 7})
    assert loaded.dropped == 0


def test_token_ids_equal_those_of_the_tokenizer(tokenizer, tmp_path):
    prompt = load_prompts([write(tmp_path / "a.parquet", [row()])], tokenizer, DataConfig()).prompts[0]
    expected = tokenizer.apply_chat_template(row()["prompt"], add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == expected


def test_equal_rows_are_rendered_and_tokenised_once_and_share_their_tokens(tokenizer, tmp_path, monkeypatch):
    rendered, tokenised = [], []
    render, call = tokenizer.apply_chat_template, type(tokenizer).__call__
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or render(*a, **k))
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **k: tokenised.extend(texts) or call(self, texts, **k)
    )
    rows = [row(str(number % 3)) for number in range(1000)]
    files = [write(tmp_path / f"{name}.parquet", rows) for name in "ab"]
    prompts = load_prompts(files, tokenizer, DataConfig()).prompts
    assert [tokenizer.decode(list(prompt.token_ids[1:2])) for prompt in prompts] == [
        str(n % 3) for n in range(1000)
    ] * 2
    assert tokenised == [f"<user>{number}<assistant>" for number in range(3)]
    assert len(rendered) == len({id(prompt.token_ids) for prompt in prompts}) == 3
    assert sys.getsizeof(prompts[0].token_ids) < 100


def test_a_tokenizer_is_given_a_piece_of_all_texts(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.data.chat._TEXTS_AT_ONCE", 2)
    given, call = [], type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **k: given.append(len(texts)) or call(self, texts, **k)
    )
    file = write(tmp_path / "a.parquet", [row(str(number)) for number in range(5)])
    prompts = load_prompts([file], tokenizer, DataConfig()).prompts
    assert [tokenizer.decode(list(prompt.token_ids[1:2])) for prompt in prompts] == ["0", "1", "2", "3", "4"]
    assert given == [2, 2, 1]


def test_a_key_that_other_messages_alone_have_is_not_there(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls[0].name if 'tool_calls' in m else m.content }}{% endfor %}"
    )
    called = {"role": "assistant", "content": "2", "tool_calls": [{"name": "f"}]}
    rows = [row("7"), row(prompt=[{"role": "user", "content": "1"}, called, {"role": "tool", "content": "3"}])]
    prompts = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig()).prompts
    assert [tokenizer.decode(list(prompt.token_ids)) for prompt in prompts] == ["7", "1f3"]


CALLS = (
    "{% for call in messages[1].tool_calls %}{% set function = call.function %}"
    "{{ function.name }}{{ function|length }}+"
    "{% if function.arguments is string %}{{ function.arguments }}"
    "{% else %}{% for key, value in function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def calling(**call):
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", **call}}]}
    return row(prompt=[{"role": "user", "content": "1"}, said, {"role": "tool", "content": "3"}])


def test_arguments_of_other_rows_calls_are_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    rows = [calling(arguments={"a": "1"}), calling(arguments={"b": ["2"]})]
    with pytest.raises(UserError, match=r"row 0 .*message 1 has a call with None among its arguments.* as JSON text"):
        load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig())


@pytest.mark.parametrize("arguments", [{"1": "2"}, "1=2"])
def test_arguments_that_all_calls_have_are_rendered_without_the_keys_of_other_calls(tmp_path, arguments):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    rows = [calling(arguments=arguments), calling(arguments=arguments, id="0")]
    prompts = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig()).prompts
    assert [tokenizer.decode(list(prompt.token_ids)) for prompt in prompts] == ["f2+1=2", "f3+1=2"]


LOOPS = "{% for key, value in arguments.items() %}{{ key }}={{ value|tojson }}+{% endfor %}"


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (LOOPS, ['1="b2"+', "2=[3, null]+1={}+", "", ""]),
        ("{{ arguments|tojson }}", ['{"1": "b2"}', '{"2": [3, null], "1": {}}', "{}", "{}"]),
        *(
            (template, ["+{'1':  'b2'}=", "+{'2':[3,null],'1':{}}=", "+{}=", "+="])
            for template in ("{{ '+' + arguments + '=' }}", "{{ '+' ~ arguments ~ '=' }}", "+{{ arguments }}=")
        ),
        ("{{ arguments + '=' }}", ["{'1':  'b2'}=", "{'2':[3,null],'1':{}}=", "{}=", "="]),
    ],
)
def test_arguments_in_json_are_a_mapping_or_text_as_the_template_takes_them(template, texts):
    """As those of GLM-4.5, of Llama 3 and of DeepSeek-V3 do."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% set arguments = messages[1].tool_calls[0].function.arguments %}}{template}"
    given = ["{'1':  'b2'}", "{'2':[3,null],'1':{}}", "{}", ""]
    for arguments, text in zip(given, texts, strict=True):
        messages = check_messages(calling(arguments=arguments.replace("'", '"'))["prompt"], "row 0")
        rendered = render(tokenizer, messages, "row 0", add_generation_prompt=True)
        assert rendered == (text if "tojson" in template else text.replace("'", '"'))


def test_an_argument_that_is_text_stays_text():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[1].tool_calls[0].function.arguments|tojson }}"
    for arguments in ({"arguments": "{}"}, '{"arguments": "{}"}'):
        messages = check_messages(calling(arguments=arguments)["prompt"], "row 0")
        assert render(tokenizer, messages, "row 0", add_generation_prompt=True) == '{"arguments": "{}"}'


def test_half_a_character_is_refused_where_a_template_makes_one_of_json(tmp_path):
    """Text cut inside an emoji; a template that writes the arguments as they are keeps its backslashes."""
    tokenizer = make_tokenizer()
    file = write(tmp_path / "a.parquet", [row(), calling(arguments='{"1": "\\ud83d"}')])
    written = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    tokenizer.chat_template = written
    assert len(load_prompts([file], tokenizer, DataConfig()).prompts) == 2
    tokenizer.chat_template = written.replace("arguments", "arguments|tojson")
    with pytest.raises(UserError, match=r"row 1 \(from 0\) of .*half of a character in these messages, '\\ud83d'"):
        load_prompts([file], tokenizer, DataConfig())


def test_calls_of_several_functions_are_rendered_by_a_template_that_reads_mappings(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    rows = [calling(arguments=arguments) for arguments in ('{"1": 2}', '{"1":  2}', '{"3": "4"}')]
    prompts = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig()).prompts
    assert [tokenizer.decode(list(prompt.token_ids)) for prompt in prompts] == ["f2+1=2", "f2+1=2", "f2+3=4"]


def test_rows_whose_arguments_are_other_texts_of_one_mapping_are_rendered_each(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% set function = messages[1].tool_calls[0].function %}{{ function.name + '=' + function.arguments }}"
    )
    rows = [calling(arguments=arguments) for arguments in ("{}", "{ }")]
    prompts = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig()).prompts
    assert prompts[0].token_ids != prompts[1].token_ids


def test_a_call_that_a_template_leaves_out_is_refused(tokenizer, tmp_path):
    chat = calling()["prompt"]
    said = r"row 1 .*, column 'prompt', message 1: .* leaves out a part of its 'tool_calls'"
    with pytest.raises(UserError, match=said):
        load_prompts([write(tmp_path / "a.parquet", [row(), row(prompt=chat)])], tokenizer, DataConfig())


def test_prompts_are_the_same_on_every_day(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = """{%- if strftime_now is defined %}{{ strftime_now("%d%m%Y") }}{%- endif %}"""
    file = write(tmp_path / "a.parquet", [row()])

    def prompt_of(day):
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 11, day, tzinfo=tz)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        return tokenizer.decode(list(load_prompts([file], tokenizer, DataConfig()).prompts[0].token_ids))

    assert prompt_of(28) == prompt_of(29) == "26072024"


def test_files_follow_each_other_and_indices_run_through(tokenizer, tmp_path):
    files = [write(tmp_path / "b.parquet", [row("1"), row("2")]), write(tmp_path / "a.parquet", [row("3")])]
    prompts = load_prompts([str(file) for file in files], tokenizer, DataConfig()).prompts
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert [tokenizer.decode(list(prompt.token_ids[1:2])) for prompt in prompts] == ["1", "2", "3"]


def test_extra_info_may_be_absent(tokenizer, tmp_path):
    rows = [row()]
    del rows[0]["extra_info"]
    assert load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig()).prompts[0].extra_info == {}


def test_the_prompt_column_is_the_configured_one(tokenizer, tmp_path):
    rows = [{**row(), "chat": row("9")["prompt"]}]
    loaded = load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig(prompt_column="chat"))
    assert tokenizer.decode(list(loaded.prompts[0].token_ids)) == "<user>9<assistant>"


def test_overlong_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    file = write(tmp_path / "a.parquet", [row("1+1"), row("1+1="), row("2")])  # 5, 6 and 3 tokens
    config = DataConfig(max_prompt_tokens=5, overlong_prompts="drop")
    loaded = load_prompts([file], tokenizer, config)
    assert loaded.dropped == 1
    assert [(prompt.index, len(prompt.token_ids)) for prompt in loaded.prompts] == [(0, 5), (1, 3)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overlong_prompts": "refuse"}, r"row 1 \(from 0\) of .*a.parquet: the prompt has 6 tokens.*=5"),
        ({"overlong_prompts": "drop", "max_prompt_tokens": 2}, "all 2 prompts"),
    ],
)
def test_overlong_prompts_are_refused(tokenizer, tmp_path, change, said):
    file = write(tmp_path / "a.parquet", [row("1"), row("1+1=")])
    config = dataclasses.replace(DataConfig(max_prompt_tokens=5), **change)
    with pytest.raises(UserError, match=said):
        load_prompts([file], tokenizer, config)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "1+2="}, "column 'prompt' must hold a non-empty list.*found '1\\+2='"),
        ({"prompt": []}, "non-empty list"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0 must have a text 'role'"),
        ({"prompt": [{"content": "1"}]}, "message 0 must have a text 'role'"),
        (
            {"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
            "column 'prompt': the last message is one of the assistant",
        ),
        ({"data_source": 3}, "'data_source' must be a text, found 3"),
        ({"reward_model": {"style": "rule"}}, "'reward_model' must hold a 'ground_truth'"),
        ({"reward_model": "3"}, "'reward_model' must hold a 'ground_truth'"),
        ({"extra_info": "index 7"}, "'extra_info' must be a struct"),
    ],
)
def test_a_bad_row_is_named(tokenizer, tmp_path, fields, said):
    file = write(tmp_path / "a.parquet", [row(**fields)])
    with pytest.raises(UserError, match=rf"row 0 \(from 0\) of .*a\.parquet.*{said}"):
        load_prompts([file], tokenizer, DataConfig())


def test_a_row_number_counts_from_the_start_of_the_file(tokenizer, tmp_path):
    rows = [row() for _ in range(1500)]
    rows[1300]["reward_model"] = {"style": "rule", "ground_truth": None}
    with pytest.raises(UserError, match=r"row 1300 \(from 0\)"):
        load_prompts([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig())


def test_a_template_that_refuses_the_chat_is_a_user_error(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"row 0.*roles must alternate"):
        load_prompts([write(tmp_path / "a.parquet", [row()])], tokenizer, DataConfig())


def test_a_tokenizer_without_a_template_is_a_user_error(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        load_prompts([write(tmp_path / "a.parquet", [row()])], tokenizer, DataConfig())


def test_no_files_is_a_user_error(tokenizer):
    with pytest.raises(UserError, match=r"data\.train_files"):
        load_prompts([], tokenizer, DataConfig())
