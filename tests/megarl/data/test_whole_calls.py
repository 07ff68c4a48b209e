import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converters.errors import UserError
from megarl.data import load_conversations, load_prompts
from megarl.data.chat import check_messages, render
from megarl.data.whole_calls import with_calls
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.schema import DataConfig

CALLS = "{%- for call in message.tool_calls or [] -%}={{ call.function.name }}{%- endfor -%}"
QWEN = "{{ message.content }}" + CALLS
GLM = "{{ 'None' if message.content is none else message.content }}" + CALLS
DEEPSEEK = "{%- if message.content is none -%}" + CALLS + "{%- else -%}{{ '' + message.content }}{%- endif -%}"
NO_TOOLS = "{{ '' + message.content }}"


def speaking(template):
    """A tokenizer with a template whose messages are written so."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages -%}<{{ message.role }}>" + template + "<end>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    return tokenizer


def said(role, content, *names, arguments="{}"):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
    return {"role": role, "content": content, "tool_calls": calls}


def write(path, **columns):
    pq.write_table(pa.Table.from_pylist([columns]), path)
    return [path]


@pytest.mark.parametrize("content", ["", None, " "])
@pytest.mark.parametrize("template", [QWEN, GLM, DEEPSEEK])
def test_a_call_needs_no_content_whichever_form_the_template_knows(tmp_path, template, content):
    tokenizer = speaking(template)
    chat = [said("user", "1"), said("assistant", content, "f", "g"), said("user", "2"), said("assistant", "3")]
    (conversation,) = load_conversations(write(tmp_path / "a.parquet", messages=chat), tokenizer, "messages", 100)
    assert tokenizer.decode(conversation.token_ids).replace(" ", "") == (
        "<user>1<end><assistant>=f=g<end><user>2<end><assistant>3<end>"
    )
    columns = {"data_source": "1", "prompt": chat[:3], "reward_model": {"ground_truth": "1"}}
    (prompt,) = load_prompts(write(tmp_path / "a.parquet", **columns), tokenizer, DataConfig()).prompts
    assert prompt.token_ids == conversation.token_ids[: len(prompt.token_ids)]


def test_content_may_be_absent_beside_calls():
    message = said("assistant", None, "f")
    del message["content"]
    assert check_messages([message], "row 0")[0]["content"] == ""


@pytest.mark.parametrize("message", [said("assistant", None), said("user", None, "f"), said("assistant", ["1"], "f")])
def test_content_is_a_text_elsewhere(message):
    with pytest.raises(UserError, match=r"row 0: message 0 must have a text 'role' and a text 'content'"):
        check_messages([message], "row 0")


@pytest.mark.parametrize(("template", "content"), [(NO_TOOLS, ""), (NO_TOOLS, "3"), (DEEPSEEK, "3"), ("", None)])
def test_a_call_that_is_lost_in_both_forms_is_refused(template, content):
    messages = check_messages([said("user", "1"), said("assistant", content, "f")], "row 0")
    with pytest.raises(UserError, match=r"row 0, message 1: .* leaves out a part of its 'tool_calls'"):
        with_calls(speaking(template), messages, "row 0")


def test_the_message_is_named_whose_call_is_lost_in_both_forms():
    messages = [said("user", "1"), said("assistant", None, "f"), said("assistant", "3", "g")]
    with pytest.raises(UserError, match=r"row 0, message 2: .* leaves out a part of its 'tool_calls'"):
        with_calls(speaking(DEEPSEEK), check_messages(messages, "row 0"), "row 0")


def test_content_stays_a_text_in_messages_whose_calls_are_written():
    tokenizer = speaking("{%- if message.content is none or loop.first -%}" + CALLS + "{%- endif -%}")
    messages = check_messages([said("assistant", None, "f"), said("assistant", None, "g"), said("user", "")], "row 0")
    assert [message["content"] for message in with_calls(tokenizer, messages, "row 0")] == ["", None, ""]


@pytest.mark.parametrize(("number", "is_written"), [("functions.f:0", True), ("call_7", False), (None, False)])
def test_a_function_may_be_named_in_the_id_of_its_call(number, is_written):
    """As by the template of Kimi-K2, which writes nothing else."""
    tokenizer = speaking("{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}")
    message = said("assistant", "", "f")
    message["tool_calls"][0]["id"] = number
    messages = check_messages([said("user", "1"), message], "row 0")
    if is_written:
        assert with_calls(tokenizer, messages, "row 0") == messages
    else:
        with pytest.raises(UserError, match=r"row 0, message 1: .* leaves out a part of its 'tool_calls'"):
            with_calls(tokenizer, messages, "row 0")


ARGUMENTS = QWEN.replace("function.name", "function.name ~ ' ' ~ call.function.arguments")
NO_OBJECTS = ["1=2", "{'1': 2}", '{"1": 2,}', "[1, 2]", '"2"', "null", "[" * 5000]


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_json_object_are_refused_where_a_template_makes_json_of_them(arguments):
    messages = check_messages([said("user", arguments), said("assistant", "", "f", arguments=arguments)], "row 0")
    tokenizer = speaking(ARGUMENTS)
    assert with_calls(tokenizer, messages, "row 0") == messages
    assert f"=f {arguments}<end>" in render(tokenizer, messages, "row 0", add_generation_prompt=False)
    tokenizer.chat_template = tokenizer.chat_template.replace(".arguments", ".arguments|tojson")
    with pytest.raises(UserError, match=r"row 0, message 1: the arguments of a call are no JSON object, found "):
        with_calls(tokenizer, messages, "row 0")


def test_arguments_may_be_absent_or_a_mapping():
    call = {"name": "f"}
    calls = [call, {**call, "arguments": {"1": "2"}}, {**call, "arguments": ["2"]}]
    messages = check_messages([said("user", "1"), said("assistant", "") | {"tool_calls": calls}], "row 0")
    assert with_calls(speaking(QWEN.replace(".function", "")), messages, "row 0") == messages
