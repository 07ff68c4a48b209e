"""Pairs of a chosen and a rejected reply, with masks of the assistant's tokens."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from converters.errors import UserError
from megarl.data.chat import Message, check_messages, check_prompt
from megarl.data.conversations import Chat, Conversation, tokenise
from megarl.data.parquet import read_rows
from megarl.schema import PreferenceConfig
from megatron_ext.packing.prefix_families import Counter
from megatron_ext.packing.prefix_tree import Prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PreferencePair(NamedTuple):
    """Two conversations with the same prompt; each ends with the last token of its reply."""

    chosen: Conversation
    rejected: Conversation


def load_pairs(
    files: Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    config: PreferenceConfig,
    max_tokens: int,
    *,
    shared_prefixes: bool = False,
    stop_token_ids: Collection[int] = (),
) -> list[PreferencePair]:
    """Read, render and tokenize the pairs of parquet `files`.

    A row holds a prompt ({role, content} list in `config.prompt_column`) and two replies to it
    (`config.chosen_column`, `config.rejected_column`). A reply is a text, or a list of messages that ends with one of
    the assistant and may begin with the prompt. Masks are those of `load_conversations`, for the replies only. Text
    that the template writes after the end token of a reply is left out, as in a rollout.

    Raises `UserError` for no files, a bad file (see `read_rows`), a bad row, an empty reply, two equal replies, a pair
    with more than `max_tokens` tokens, and a chat template that `load_conversations` would refuse. With
    `shared_prefixes` a prefix of both conversations counts once, since it is computed once.
    """
    if not files:
        raise UserError(
            "no data file is given; name parquet files in preference.train_files (or preference.eval_files)"
        )
    chats = (chat for file in files for row in _read_file(file, config) for chat in row)
    replies = (
        (chat, _cut_after_reply(reply)) for chat, reply in tokenise(chats, tokenizer, max_tokens, stop_token_ids)
    )
    pairs = []
    for (chat, chosen), (_, rejected) in zip(replies, replies, strict=True):
        pair = PreferencePair(chosen, rejected)
        if pair.chosen == pair.rejected:
            raise UserError(
                f"{chat.where} and its rejected reply are the same, so that there is nothing to prefer: take the row "
                f"out"
            )
        tokens = _tokens(pair, shared_prefixes=shared_prefixes)
        if tokens > max_tokens:
            prompts = "the prompt once" if shared_prefixes else "prompts included"
            raise UserError(
                f"{chat.where} and its rejected reply have {tokens} tokens together, {prompts}, more than the "
                f"limit of {max_tokens}; shorten them, take the row out, or raise loop.max_tokens_per_micro_batch"
            )
        pairs.append(pair)
    return pairs


def _tokens(pair: PreferencePair, *, shared_prefixes: bool) -> int:
    """Count the tokens that are computed for a pair."""
    replies = [np.array(each.token_ids) for each in pair]
    counter = Counter([len(each) for each in replies], Prefixes.of(replies) if shared_prefixes else None)
    return counter([0, 1]).tokens


def _read_file(file: str | Path, config: PreferenceConfig) -> Iterator[tuple[Chat, Chat]]:
    """Yield the chats of the chosen and the rejected reply of every row."""
    columns = [config.prompt_column, config.chosen_column, config.rejected_column]
    keys = [f"preference.{name}_column" for name in ("prompt", "chosen", "rejected")]
    for number, row in read_rows(file, columns, named_by=dict(zip(columns, keys, strict=True))):
        where = [f"row {number} (from 0) of {file}, column {column!r}" for column in columns]
        prompt = check_prompt(row[config.prompt_column], where[0])
        yield (
            _chat(prompt, row[config.chosen_column], where[1], config.prompt_column),
            _chat(prompt, row[config.rejected_column], where[2], config.prompt_column),
        )


def _chat(prompt: list[Message], reply: Any, where: str, prompt_column: str) -> Chat:
    if isinstance(reply, str):
        messages: list[Message] = [{"role": "assistant", "content": reply}]
    elif isinstance(reply, list):
        messages = check_messages(reply, where)
        if _says(messages[: len(prompt)]) == _says(prompt):
            messages = messages[len(prompt) :]
    else:
        raise UserError(f"{where} must hold a text or a list of {{role, content}} messages, found {reply!r}")
    if messages and messages[0]["role"] in ("system", "user"):
        raise UserError(
            f"{where} begins with other messages than the prompt in column {prompt_column!r}, so that one of the two is"
            " not what was answered: repeat that prompt, the same to the letter, or leave it out of the reply"
        )
    if not messages or messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: the last message must be one of the role 'assistant', the reply to the prompt")
    if not messages[-1]["content"].strip() and "tool_calls" not in messages[-1]:
        raise UserError(f"{where} is an empty reply: write what the assistant said, or take the row out")
    return Chat(where, [*prompt, *messages], first=len(prompt))


def _says(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _cut_after_reply(conversation: Conversation) -> Conversation:
    end = len(conversation.mask) - conversation.mask[::-1].index(True)
    return Conversation(conversation.token_ids[:end], conversation.mask[:end])
