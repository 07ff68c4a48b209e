"""Ends of turns: what a model learns of a reply is what it would have to write for a response to end there."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken

from converters.errors import UserError
from megarl.data import load_conversations, load_pairs
from megarl.data.turn_ends import ends_of
from megarl.quickstart.tiny_models import make_tokenizer
from megarl.schema import PreferenceConfig

# As GLM-4.5's: no end of a turn, past reasoning left out, and results of tools with a role of their own.
GLM = (
    "{%- set last = namespace(asked=-1) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set last.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}<{{ m.role }}>"
    "{%- if m.role == 'assistant' -%}"
    "<think>{{ m.reasoning_content if m.reasoning_content and loop.index0 > last.asked }}</think>{%- endif -%}"
    "{{ m.content }}{%- for call in m.tool_calls or [] -%}={{ call.name }}{%- endfor -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@pytest.fixture(params=[False, True], ids=["plain think", "special think"])
def tokenizer(request):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<tool>", "<system>")])
    tokenizer.add_tokens([AddedToken(name, special=request.param) for name in ("<think>", "</think>")])
    tokenizer.chat_template = GLM
    return tokenizer


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def load(tokenizer, folder, messages, *stops):
    path = folder / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
    stop_token_ids = tokenizer.convert_tokens_to_ids(list(stops))
    (conversation,) = load_conversations([path], tokenizer, "messages", 1000, stop_token_ids=stop_token_ids)
    return conversation


def learned(tokenizer, conversation):
    """The text that is learned, with a bar where it goes on after a break."""
    token_ids, mask = conversation
    assert len(token_ids) == len(mask)
    texts = [tokenizer.decode(token) if said else "|" for token, said in zip(token_ids, mask, strict=True)]
    return "|".join(part for part in "".join(texts).split("|") if part)


def ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, return_dict=False)


ENDS = ("<end>", "<user>", "<tool>")
CALL = {"tool_calls": [{"name": "12"}]}


def test_a_turn_without_an_end_ends_with_the_token_of_the_next_message(tokenizer, tmp_path):
    messages = [say("user", "1"), say("assistant", "2"), say("user", "3"), say("assistant", "4")]
    whole = load(tokenizer, tmp_path, messages, *ENDS)
    assert learned(tokenizer, whole) == "<think></think>2<user>|<think></think>4<user>"
    assert list(whole.token_ids) == [*ids(tokenizer, messages), *tokenizer.encode("<user>")]
    goes_on = load(tokenizer, tmp_path, messages[:3], *ENDS)
    assert learned(tokenizer, goes_on) == "<think></think>2<user>"
    assert list(goes_on.token_ids) == ids(tokenizer, messages[:3])


def test_a_reply_that_would_lose_its_reasoning_to_a_next_message_ends_as_others_do(tokenizer, tmp_path):
    messages = [say("user", "1"), say("assistant", "2", reasoning_content="1+1")]
    assert learned(tokenizer, load(tokenizer, tmp_path, messages, *ENDS)) == "<think>1+1</think>2<user>"


def test_a_call_ends_with_the_token_of_its_result(tokenizer, tmp_path):
    messages = [say("user", "1"), say("assistant", "", **CALL), say("tool", "3"), say("assistant", "4")]
    whole = load(tokenizer, tmp_path, messages, *ENDS)
    assert learned(tokenizer, whole) == "<think></think>=12<tool>|<think></think>4<user>"
    assert learned(tokenizer, load(tokenizer, tmp_path, messages[:2], *ENDS)) == "<think></think>=12<tool>"


def test_an_end_in_the_text_of_a_message_is_not_its_end(tokenizer, tmp_path):
    messages = [say("user", "1"), say("assistant", "2<user>3")]
    assert learned(tokenizer, load(tokenizer, tmp_path, messages, *ENDS)) == "<think></think>2<user>3<user>"


@pytest.mark.parametrize("behind", [say("system", "3"), say("assistant", "3")])
def test_a_turn_before_a_message_at_which_no_response_ends_is_refused(tokenizer, tmp_path, behind):
    with pytest.raises(UserError, match=r"row 0 .*ends an assistant message without a special token"):
        load(tokenizer, tmp_path, [say("user", "1"), say("assistant", "2"), behind], *ENDS)


def test_a_special_token_before_the_text_of_a_message_is_no_end(tokenizer, tmp_path):
    for messages in ([say("user", "1"), say("assistant", content)] for content in "12"):
        with pytest.raises(UserError, match=r"row 0 .*ends an assistant message without a special token"):
            load(tokenizer, tmp_path, messages, "<end>")


def test_pairs_end_so_too(tokenizer, tmp_path):
    path = tmp_path / "pairs.parquet"
    prompt = [say("user", "1"), say("assistant", "2"), say("user", "3")]
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt, "chosen": "4", "rejected": "5"}]), path)
    stops = tokenizer.convert_tokens_to_ids(list(ENDS))
    (pair,) = load_pairs([path], tokenizer, PreferenceConfig(), 1000, stop_token_ids=stops)
    for conversation, reply in zip(pair, "45", strict=True):
        assert learned(tokenizer, conversation) == f"<think></think>{reply}<user>"
        assert list(conversation.token_ids) == [
            *ids(tokenizer, [*prompt, say("assistant", reply)]),
            *tokenizer.encode("<user>"),
        ]


@pytest.mark.parametrize(
    ("stops", "end"), [((), "<end> <tool>"), (("<end>",), "<end>"), (("<tool>",), "<end> <tool>"), (ENDS, "<end>")]
)
def test_the_first_stop_token_behind_the_text_is_the_end(tokenizer, tmp_path, stops, end):
    tokenizer.chat_template = (
        "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}<end> <tool>={%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    messages = [say("user", "1"), say("assistant", "2=")]
    assert learned(tokenizer, load(tokenizer, tmp_path, messages, *stops)) == f"2={end}"


def test_a_stop_token_that_is_not_special_is_an_end(tokenizer, tmp_path):
    tokenizer.add_tokens([AddedToken("<eot>", special=False)])
    tokenizer.chat_template = (
        "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}<eot>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    messages = [say("user", "1"), say("assistant", "2=")]
    assert learned(tokenizer, load(tokenizer, tmp_path, messages, "<eot>")) == "2=<eot>"


def test_a_template_that_refuses_the_next_message_can_still_write_an_end(tokenizer, tmp_path):
    alone = (
        "{%- if messages | length > 2 -%}{{ raise_exception('one question') }}{%- endif -%}"
        "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}END{%- endfor -%}"
        "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
    )
    messages = [say("user", "1"), say("assistant", "2")]
    tokenizer.chat_template = alone.replace("END", "<end>")
    assert learned(tokenizer, load(tokenizer, tmp_path, messages, "<tool>")) == "2<end>"
    tokenizer.chat_template = alone.replace("END", "")
    with pytest.raises(UserError, match=r"row 0 .*ends an assistant message without a special token"):
        load(tokenizer, tmp_path, messages, *ENDS)


def test_ends_of_all_learned_turns_are_found():
    conversations = [([1, 2, 3, 4, 5], [False, True, True, False, True]), ([6, 7], [True, False]), ([8], [False])]
    assert ends_of(conversations) == {3, 5, 6}
