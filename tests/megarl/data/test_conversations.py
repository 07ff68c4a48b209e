import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from converters.errors import UserError
from megarl.data import load_conversations
from megarl.quickstart.tiny_models import make_tokenizer

CHATML = (
    "{%- for message in messages -%}<user>{{ message.role }}({{ message.content }}<end>){%- endfor -%}"
    "{%- if add_generation_prompt -%}<user>assistant({%- endif -%}"
)
FORGETS_REASONING = (
    "{%- for message in messages -%}<user>"
    "{%- if message.role == 'assistant' and not loop.last -%}{{ message.content.split('/')[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<end>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<user>{%- endif -%}"
)
NO_END = "{%- for message in messages -%}{{ message.content }}.{%- endfor -%}"

contents = st.text("0123456789+= abc", max_size=6)
turns = st.lists(st.tuples(contents, contents), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def load(tokenizer, folder, *chats, max_tokens=1000):
    path = folder / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in chats]), path)
    return load_conversations([path], tokenizer, "messages", max_tokens)


def masked_text(tokenizer, conversation):
    token_ids, mask = conversation
    assert len(token_ids) == len(mask)
    return tokenizer.decode([token for token, masked in zip(token_ids, mask, strict=True) if masked])


@given(turns=turns, open_end=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@pytest.mark.parametrize("template", [None, CHATML])
def test_the_mask_covers_contents_and_end_tokens_only(tmp_path, template, turns, open_end):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = chat(*(content for turn in turns for content in turn), *(["?"] if open_end else []))
    (conversation,) = load(tokenizer, tmp_path, messages)
    assert masked_text(tokenizer, conversation) == "".join(f"{answer}<end>" for _, answer in turns)
    assert list(conversation.token_ids) == tokenizer.apply_chat_template(messages, return_dict=False)


def test_rows_keep_their_order(tokenizer, tmp_path):
    loaded = load(tokenizer, tmp_path, chat("1", "2"), chat("3", "4", "5", "6"))
    assert [masked_text(tokenizer, conversation) for conversation in loaded] == ["2<end>", "4<end>6<end>"]


def test_many_conversations_take_five_bytes_a_token_and_texts_of_few_at_a_time(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.data.conversations._CHATS_AT_ONCE", 2)
    given, call = [], type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **k: given.append(len(texts)) or call(self, texts, **k)
    )
    loaded = load(tokenizer, tmp_path, *(chat("1", str(number) * 900) for number in range(5)))
    assert [masked_text(tokenizer, each)[0] for each in loaded] == list("01234")
    assert max(given) == 6  # two chats, each to the begin and the end of its turn, and as a whole
    for conversation in loaded:
        assert sum(map(sys.getsizeof, conversation)) < 5.5 * len(conversation.token_ids)


def test_a_template_that_rewrites_history_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETS_REASONING
    (single,) = load(tokenizer, tmp_path, chat("1", "2/3"))
    assert masked_text(tokenizer, single) == "2/3<end>"
    with pytest.raises(UserError, match=r"row 1 .*renders earlier turns differently"):
        load(tokenizer, tmp_path, chat("1", "2/3"), chat("1", "2/3", "4", "5"))


DROPS_THOUGHTS = (
    "{%- for message in messages -%}{%- if message.role == 'user' -%}<user>{{ message.content }}{%- else -%}"
    "<assistant>{{ message.content.split('=')[-1] }}<end>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@pytest.mark.parametrize("begin", ["", "+"])
def test_a_template_that_leaves_out_a_part_of_a_reply_is_refused(tmp_path, begin):
    """As DeepSeek-R1's does, whatever it writes behind <assistant> to ask for a reply."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = DROPS_THOUGHTS.replace("<assistant>{%- endif", f"<assistant>{begin}{{%- endif")
    for thoughts in ("3=", "2="):
        with pytest.raises(UserError, match=r"row 0 .*, message 1: .* leaves out a part of its 'content'"):
            load(tokenizer, tmp_path, chat("1 3=2", f"+{thoughts}2"))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_a_template_does_not_know_is_refused(tokenizer, tmp_path, key):
    thinks = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", key: "1+1"}]
    with pytest.raises(UserError, match=rf"leaves out a part of its '{key}'"):
        load(tokenizer, tmp_path, thinks)


@pytest.mark.parametrize("value", [["1"], {"text": "1"}, 1, True])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_is_no_text_is_refused(tokenizer, tmp_path, key, value):
    thinks = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", key: value}]
    with pytest.raises(UserError, match=rf"row 0 .*, message 1: its '{key}' must be a text"):
        load(tokenizer, tmp_path, thinks)


FIRST_CALL = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}"
    "{%- if message.tool_calls -%}{%- set call = message.tool_calls[0] -%}"
    "={{ call.function.name if call.function else call.name }}{%- endif -%}<end>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


def calling(content, *calls):
    return [{"role": "user", "content": "1"}, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


@pytest.mark.parametrize("call", [{"name": "12"}, {"function": {"name": "12"}}])
def test_a_call_that_a_template_leaves_out_is_refused(tmp_path, call):
    """As a template does that knows no tools, or writes one call alone, even if the name stands in the content."""
    tokenizer = make_tokenizer()
    for content in ("", "12"):
        with pytest.raises(UserError, match=r"row 0 .*, message 1: .* leaves out a part of its 'tool_calls'"):
            load(tokenizer, tmp_path, calling(content, call))
    tokenizer.chat_template = FIRST_CALL
    (conversation,) = load(tokenizer, tmp_path, calling("12", call))
    assert masked_text(tokenizer, conversation) == "12=12<end>"
    with pytest.raises(UserError, match=r"leaves out a part of its 'tool_calls'"):
        load(tokenizer, tmp_path, calling("", call, call))


def test_all_calls_of_a_chat_are_looked_for_in_one_rendering(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}"
        "{%- for call in message.tool_calls or [] -%}{{ call.name }}{%- endfor -%}<end>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    rendered, apply = [], tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or apply(*a, **k))
    messages = calling("", *({"name": str(number)} for number in range(9)))
    (conversation,) = load(tokenizer, tmp_path, [*messages, *messages])
    assert masked_text(tokenizer, conversation) == "012345678<end>" * 2
    # Two turns to their ends, the second to its beginning, the whole, and one to look for calls.
    assert sum(any(each.get("tool_calls") for each in arguments[0]) for arguments in rendered) == 5


@pytest.mark.parametrize("call", ["12", {"function": "12"}, {"arguments": "12"}])
def test_a_call_without_a_name_is_refused(tokenizer, tmp_path, call):
    with pytest.raises(UserError, match=r"row 0 .*, message 1: its 'tool_calls' must be a list"):
        load(tokenizer, tmp_path, calling("", call))


def test_calls_that_are_no_list_are_refused(tokenizer, tmp_path):
    messages = chat("1", "2")
    messages[1]["tool_calls"] = 7
    with pytest.raises(UserError, match=r"row 0 .*, message 1: its 'tool_calls' must be a list"):
        load(tokenizer, tmp_path, messages)


@pytest.mark.parametrize("calls", [None, []])
def test_a_reply_may_have_no_calls(tmp_path, calls):
    """A template may ask for the key alone, as DeepSeek-V3's does, and write calls in place of the content."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace(
        "{{ message.content }}", "{{ '?' if 'tool_calls' in message else message.content }}"
    )
    messages = chat("1", "2")
    for message in messages:
        message["tool_calls"] = calls
    (conversation,) = load(tokenizer, tmp_path, messages)
    assert tokenizer.decode(conversation.token_ids) == "<user>user(1<end>)<user>assistant(2<end>)"


def test_a_reply_may_lose_spaces_and_begin_in_the_generation_prompt(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages -%}<{{ message.role }}>{{ message.content.replace(' ', '') }}<end>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>+{%- endif -%}"
    )
    (conversation,) = load(tokenizer, tmp_path, chat("1", " + 2 "))
    assert masked_text(tokenizer, conversation) == "2<end>"


def test_a_template_without_an_end_token_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = NO_END
    with pytest.raises(UserError, match=r"row 0 .*without a special token"):
        load(tokenizer, tmp_path, chat("1", "2"))


def test_a_token_across_the_border_of_a_turn_is_refused(tmp_path):
    words = Tokenizer(WordLevel({"?": 0, "<end>": 1, "a": 2, "b": 3, " ": 4, "  ": 5}, unk_token="?"))
    words.pre_tokenizer = Split(Regex(r"\s+|."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = (
        "{%- for message in messages -%}{{ ' ' + message.content }}<end>{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ ' ' }}{%- endif -%}"
    )
    (conversation,) = load(tokenizer, tmp_path, chat("a", "b"))
    assert list(map(list, conversation)) == [[4, 2, 1, 4, 3, 1], [0, 0, 0, 0, 1, 1]]
    with pytest.raises(UserError, match=r"row 0 .*joins the text of two turns"):
        load(tokenizer, tmp_path, chat("a", " b"))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (chat("1"), "no message has the role 'assistant'"),
        (chat("1", "2")[1:], "begins with a message of the assistant"),
        (chat("1", "2345"), "has 8 tokens, more than the limit of 7; .* raise loop.max_tokens_per_micro_batch"),
        (chat("1", "2" * 1000), "more than 7 tokens can hold; .* raise loop.max_tokens_per_micro_batch"),
        ([{"role": "user", "content": None}], "message 0 must have a text"),
    ],
)
def test_a_bad_row_is_named(tokenizer, tmp_path, messages, said):
    with pytest.raises(UserError, match=rf"row 1 \(from 0\) of .*chats.parquet, column 'messages'.*{said}"):
        load(tokenizer, tmp_path, chat("1", "234"), messages, max_tokens=7)


def test_no_files_is_a_user_error(tokenizer):
    with pytest.raises(UserError, match=r"sft\.train_files"):
        load_conversations([], tokenizer, "messages", 10)


def test_a_template_that_writes_nothing_before_a_reply_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages if message.content -%}{{ message.content }}<end>{%- endfor -%}"
    )
    with pytest.raises(UserError, match=r"row 0 .*nothing to predict its first token from"):
        load(tokenizer, tmp_path, chat("", "1"))


def test_conversations_are_those_of_the_column_that_is_named(tokenizer, tmp_path):
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat("1", "2"), "dialogue": chat("3", "4")}]), path)
    (conversation,) = load_conversations([path], tokenizer, "dialogue", 1000)
    assert masked_text(tokenizer, conversation) == "4<end>"
