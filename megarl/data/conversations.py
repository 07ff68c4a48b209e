"""Conversations for supervised fine-tuning, with masks of the assistant's tokens."""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from converters.errors import UserError
from megarl.data.chat import LengthBound, Message, check_messages, encode, render
from megarl.data.parquet import read_rows
from megarl.data.turn_ends import TurnEnds
from megarl.data.whole_calls import with_calls
from megarl.data.whole_replies import check_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CHATS_AT_ONCE = 256
"""Texts of a chat, one for each turn's begin and end, take many times its tokens."""


class Conversation(NamedTuple):
    """A whole chat: `token_ids` [T] and `mask` [T], 1 for the tokens that the assistant has to generate, else 0."""

    token_ids: Sequence[int]
    """Conversations from files have an array here and bytes as the mask: lists would take nine times the memory."""
    mask: Sequence[int]


class Chat(NamedTuple):
    """Messages of a conversation; the assistant's messages from index `first` on are trained on.

    Error messages begin with `where` (file, row, column).
    """

    where: str
    messages: Sequence[Message]
    first: int = 0


def load_conversations(
    files: Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    messages_column: str,
    max_tokens: int,
    group: str = "sft",
    stop_token_ids: Collection[int] = (),
) -> list[Conversation]:
    """Read, render and tokenize the chats ({role, content} lists in `messages_column`) of parquet `files`.

    `group` is the configuration group that names files and column, for error messages.

    The mask of an assistant turn begins after the generation prompt and ends with the turn's end token (`TurnEnds`;
    responses end at `stop_token_ids`): exactly the tokens that the model would have to generate. It is found by
    rendering the chat turn by turn. If a template ends a turn with the first token of the next message, that token is
    appended to the last turn.

    Raises `UserError` for no files, a bad file (see `read_rows`), a bad row, and a chat that has no assistant turn,
    begins with one, or is longer than `max_tokens`. Also for a chat template that renders earlier turns differently
    once others follow (such as one that drops past reasoning), leaves out a part of a reply or an earlier tool call,
    writes nothing before the assistant's first turn, or ends turns without a special token.
    """
    if not files:
        raise UserError(f"no data file is given; name parquet files in {group}.train_files (or {group}.eval_files)")
    chats = (
        Chat(where, check_messages(row[messages_column], where))
        for file in files
        for number, row in read_rows(file, [messages_column], named_by={messages_column: f"{group}.messages_column"})
        for where in [f"row {number} (from 0) of {file}, column {messages_column!r}"]
    )
    conversations = []
    for chat, conversation in tokenise(chats, tokenizer, max_tokens, stop_token_ids):
        if len(conversation.token_ids) > max_tokens:
            raise UserError(
                f"{chat.where}: the conversation has {len(conversation.token_ids)} tokens, more than the limit of "
                f"{max_tokens}; shorten it, take it out, or raise loop.max_tokens_per_micro_batch"
            )
        conversations.append(conversation)
    return conversations


def tokenise(
    chats: Iterable[Chat], tokenizer: "PreTrainedTokenizerBase", max_tokens: int, stop_token_ids: Collection[int] = ()
) -> Iterator[tuple[Chat, Conversation]]:
    """Render and tokenize chats and build their masks; raises `UserError` as `load_conversations`.

    Refuses a chat for its length only if its number of characters proves that it exceeds `max_tokens`: the caller has
    to check the result.
    """
    chats, bound, ends = iter(chats), LengthBound(tokenizer), TurnEnds(tokenizer, stop_token_ids)
    while piece := list(islice(chats, _CHATS_AT_ONCE)):
        rendered = [_render_turns(tokenizer, chat) for chat in piece]
        for chat, texts in zip(piece, rendered, strict=True):
            bound.check(texts[-1], max_tokens, chat.where)
        encoded = encode(tokenizer, [text for texts in rendered for text in texts])
        for chat, texts in zip(piece, rendered, strict=True):
            yield chat, _mask_turns(chat, [next(encoded) for _ in texts], ends)


def _render_turns(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> list[str]:
    """Render growing prefixes of the chat, the last one the whole chat.

    Prefix 2 * k ends where the k-th turn to learn begins, prefix 2 * k + 1 where it ends.
    """
    where, messages = chat.where, chat.messages
    if messages[0]["role"] == "assistant" and chat.first == 0:
        raise UserError(f"{where}: the chat begins with a message of the assistant: put what it answers before it")
    messages = with_calls(tokenizer, messages, where)
    texts = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number >= chat.first:
            texts.append(render(tokenizer, messages[:number], where, add_generation_prompt=True))
            texts.append(render(tokenizer, messages[: number + 1], where, add_generation_prompt=False))
            check_texts(f"{where}, message {number}", message, *texts[-2:])
    if not texts:
        raise UserError(f"{where}: no message has the role 'assistant', so there is nothing to learn from it")
    texts.append(render(tokenizer, messages, where, add_generation_prompt=False))
    for shorter, longer in pairwise(texts):
        if not longer.startswith(shorter):
            raise UserError(
                f"{where}: the model's chat template renders earlier turns differently once later ones follow, so "
                f"the assistant's tokens cannot be told apart; use a template that keeps history or split the "
                f"conversation into rows with one assistant message each"
            )
    return texts


def _mask_turns(chat: Chat, prefixes: list[list[int]], ends: TurnEnds) -> Conversation:
    """Mask each turn from the end of `prefixes[2 * k]` to its end token, within or just after `prefixes[2 * k + 1]`."""
    where, token_ids = chat.where, prefixes[-1]
    mask = bytearray(len(token_ids))
    for prefix in prefixes:
        if token_ids[: len(prefix)] != prefix:
            raise UserError(
                f"{where}: the tokenizer joins the text of two turns into one token, so the assistant's tokens cannot "
                f"be told apart; strip the white space around the contents"
            )
    turns = list(zip(prefixes[:-1:2], prefixes[1::2], strict=True))
    messages = [message for message in chat.messages if message["role"] == "assistant"][-len(turns) :]
    for message, (before, after) in zip(messages, turns, strict=True):
        begin, following = len(before), next(iter(token_ids[len(after) :]), None)
        learned = ends.learned(where, message, after[begin:], following)
        if begin + len(learned) > len(token_ids):
            token_ids = [*token_ids, learned[-1]]
            mask.append(1)
        mask[begin : begin + len(learned)] = b"\1" * len(learned)
    if mask[0]:
        raise UserError(
            f"{where}: the model's chat template writes nothing before the assistant's first message, so that there is "
            f"nothing to predict its first token from; use a template that begins its turns with a token"
        )
    return Conversation(array("i", token_ids), bytes(mask))
