import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.data import load_pairs
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.schema import PreferenceConfig

# The template writes something after the end token, which no rollout has.
CHATML = (
    "{%- for message in messages -%}<user>{{ message.role }}({{ message.content }}<end>) {%- endfor -%}"
    "{%- if add_generation_prompt -%}<user>assistant({%- endif -%}"
)
contents = st.text("0123456789+= abc", max_size=6)
replies = contents.filter(str.strip)


def say(role, content):
    return {"role": role, "content": content}


def load(tokenizer, folder, *rows, max_tokens=1000, config=None, shared_prefixes=False):
    path = folder / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return load_pairs([path], tokenizer, config or PreferenceConfig(), max_tokens, shared_prefixes=shared_prefixes)


def row(chosen, rejected, prompt="1+1="):
    return {"prompt": [say("user", prompt)], "chosen": chosen, "rejected": rejected}


def masked_text(tokenizer, conversation):
    pairs = zip(conversation.token_ids, conversation.mask, strict=True)
    return tokenizer.decode([token for token, masked in pairs if masked])


@given(history=st.lists(st.tuples(contents, contents), max_size=2), question=contents, both=st.tuples(replies, replies))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@pytest.mark.parametrize("template", [None, CHATML])
def test_only_the_replies_are_learned_and_the_end_token_ends_them(tmp_path, template, history, question, both):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    chosen, rejected = both
    turns = [message for asked, said in history for message in (say("user", asked), say("assistant", said))]
    prompt = [*turns, say("user", question)]
    if chosen == rejected:
        return
    (pair,) = load(tokenizer, tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    for conversation, reply in zip(pair, both, strict=True):
        assert masked_text(tokenizer, conversation) == f"{reply}<end>"
        assert list(conversation.token_ids[: len(start)]) == start
        assert list(conversation.mask) == [0] * len(start) + [1] * (len(conversation.mask) - len(start))
        assert conversation.token_ids[-1] == tokenizer.eos_token_id


def test_replies_are_texts_or_messages_with_or_without_the_prompt(tmp_path):
    tokenizer = make_tokenizer()
    prompt = [say("user", "1+1=")]
    as_text = load(tokenizer, tmp_path, row("2", "3"))
    as_messages = load(tokenizer, tmp_path, row([say("assistant", "2")], [say("assistant", "3")]))
    whole = load(tokenizer, tmp_path, row([*prompt, say("assistant", "2")], [*prompt, say("assistant", "3")]))
    assert as_text == as_messages == whole
    several = [say("assistant", "2"), say("user", "?"), say("assistant", "2")]
    (pair,) = load(tokenizer, tmp_path, row(several, [say("assistant", "3")]))
    assert masked_text(tokenizer, pair.chosen) == "2<end>2<end>"
    assert masked_text(tokenizer, pair.rejected) == "3<end>"


def test_columns_have_the_names_of_the_configuration(tmp_path):
    tokenizer = make_tokenizer()
    config = PreferenceConfig(prompt_column="question", chosen_column="good", rejected_column="bad")
    given = [{"question": [say("user", "1")], "good": "2", "bad": str(i)} for i in (3, 4)]
    loaded = load(tokenizer, tmp_path, *given, config=config)
    assert [masked_text(tokenizer, pair.rejected) for pair in loaded] == ["3<end>", "4<end>"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row("2", "2"), "column 'chosen' and its rejected reply are the same"),
        (row("", "2"), "column 'chosen' is an empty reply"),
        (row("2", " "), "column 'rejected' is an empty reply"),
        (row(None, "2"), "column 'chosen' must hold a text or a list .*found None"),
        (row("22222", "333333"), "have 25 tokens together, .*the limit of 24"),
        ({"prompt": [], "chosen": "2", "rejected": "3"}, "column 'prompt' must hold a non-empty list"),
        (
            {"prompt": [say("user", "1"), say("assistant", "2")], "chosen": "2", "rejected": "3"},
            "column 'prompt': the last message is one of the assistant",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, says):
    good = row("2", "3")
    with pytest.raises(UserError, match=rf"^row 1 \(from 0\) of .*pairs\.parquet, .*{says}"):
        load(make_tokenizer(), tmp_path, good, bad, max_tokens=24)


def test_a_prompt_that_is_computed_once_counts_once(tmp_path):
    pair = row("22222", "333333", prompt="1+1=" * 5)
    with pytest.raises(UserError, match=r"have 57 tokens together, prompts included, .*the limit of 56"):
        load(make_tokenizer(), tmp_path, pair, max_tokens=56)
    assert load(make_tokenizer(), tmp_path, pair, max_tokens=35, shared_prefixes=True)
    with pytest.raises(UserError, match=r"have 35 tokens together, the prompt once, .*the limit of 34"):
        load(make_tokenizer(), tmp_path, pair, max_tokens=34, shared_prefixes=True)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ([say("user", "1+1=")], "the last message must be one of the role 'assistant'"),
        ([say("user", "1+1"), say("assistant", "3")], "begins with other messages than the prompt in column 'prompt'"),
        ([say("system", "0"), say("user", "1+1="), say("assistant", "3")], "begins with other messages"),
        ([say("user", "1+1="), say("user", "?"), say("assistant", "3")], "begins with other messages"),
        ([say("assistant", "2"), say("user", "?")], "the last message must be one of the role 'assistant'"),
        ([say("assistant", "")], "is an empty reply"),
        ([], "must hold a non-empty list"),
    ],
)
def test_a_bad_list_of_messages_is_named(tmp_path, reply, says):
    good = row([say("assistant", "2")], [say("assistant", "3")])
    with pytest.raises(UserError, match=rf"^row 1 .*column 'rejected'.*{says}"):
        load(make_tokenizer(), tmp_path, good, row([say("assistant", "2")], reply))


def test_a_call_that_a_template_leaves_out_of_the_prompt_is_refused(tmp_path):
    called = [say("user", "1"), say("assistant", "") | {"tool_calls": [{"name": "2"}]}, say("user", "?")]
    with pytest.raises(UserError, match=r"row 0 .*, message 1: .* leaves out a part of its 'tool_calls'"):
        load(make_tokenizer(), tmp_path, row("3", "4") | {"prompt": called})


@pytest.mark.parametrize("content", ["", None])
def test_a_reply_may_be_a_call_alone(tmp_path, content):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace("message.content", "message.tool_calls[0].name if message.tool_calls")
    called = [[say("assistant", content) | {"tool_calls": [{"name": name}]}] for name in ("2", "3")]
    (pair,) = load(tokenizer, tmp_path, row(*called))
    assert [masked_text(tokenizer, reply) for reply in pair] == ["2<end>", "3<end>"]


def test_no_files_is_a_user_error():
    with pytest.raises(UserError, match=r"preference\.train_files"):
        load_pairs([], make_tokenizer(), PreferenceConfig(), 10)
