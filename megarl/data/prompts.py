"""Prompts from parquet files with verl's columns: data_source, prompt, reward_model, extra_info."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.data.chat import LengthBound, check_prompt, encode, render
from megarl.data.parquet import read_rows
from megarl.data.whole_calls import with_calls
from megarl.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt; `index` is its position in its `PromptSet`.

    Example: Prompt(17, "gsm8k", [5, 9], ground_truth="4", extra_info={"split": "train"})
    """

    index: int
    data_source: str
    token_ids: Sequence[int]
    """An array; rows with the same messages share it."""
    ground_truth: Any
    extra_info: Mapping[str, Any]
    where: str = ""
    """File and row, for messages."""


@dataclass(frozen=True)
class PromptSet:
    """All prompts of some files, in order, and how many were dropped for their length."""

    prompts: list[Prompt]
    dropped: int


@dataclass(frozen=True)
class _Row:
    where: str
    text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


def load_prompts(files: Sequence[str | Path], tokenizer: "PreTrainedTokenizerBase", config: DataConfig) -> PromptSet:
    """Read, render and tokenize the prompts of parquet `files`.

    A row holds `data_source` (text), `config.prompt_column` (list of {role, content}), `reward_model` ({style,
    ground_truth}) and optionally `extra_info` (a struct). Prompts are rendered with the generation prompt at the end.

    Raises `UserError` for no files, a bad file (see `read_rows`), a bad row, a chat template that leaves out a tool
    call, a prompt longer than `config.max_prompt_tokens` unless `config.overlong_prompts` is "drop", and if no prompt
    is left.
    """
    if not files:
        raise UserError("no data file is given; name parquet files in data.train_files (or data.eval_files)")
    texts: dict[str, str] = {}
    rows = [row for file in files for row in _read_file(file, tokenizer, config.prompt_column, texts)]
    bound, limit = LengthBound(tokenizer), config.max_prompt_tokens
    short = [row for row in rows if not bound.exceeds(row.text, limit)]
    if len(short) < len(rows) and config.overlong_prompts == "refuse":
        row = next(row for row in rows if bound.exceeds(row.text, limit))
        raise _too_long(row, f"{len(row.text)} characters", limit)
    distinct = list(dict.fromkeys(row.text for row in short))
    # Arrays, since lists take ten times the memory.
    arrays = (array("i", token_ids) for token_ids in encode(tokenizer, distinct))
    encoded = dict(zip(distinct, arrays, strict=True))
    prompts: list[Prompt] = []
    for row in short:
        token_ids = encoded[row.text]
        if not token_ids:
            raise UserError(f"{row.where}: the chat template makes no token of this prompt; rewrite it, or take it out")
        if len(token_ids) > limit:
            if config.overlong_prompts == "refuse":
                raise _too_long(row, f"{len(token_ids)} tokens", limit)
            continue
        prompts.append(Prompt(len(prompts), row.data_source, token_ids, row.ground_truth, row.extra_info, row.where))
    if not prompts:
        raise UserError(
            f"all {len(rows)} prompts of {', '.join(map(str, files))} are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens}; raise the limit"
        )
    return PromptSet(prompts, dropped=len(rows) - len(prompts))


def _too_long(row: _Row, length: str, limit: int) -> UserError:
    return UserError(
        f"{row.where}: the prompt has {length}, more than data.max_prompt_tokens={limit} can hold; shorten it, raise "
        "the limit or set data.overlong_prompts=drop"
    )


def _read_file(
    file: str | Path, tokenizer: "PreTrainedTokenizerBase", prompt_column: str, texts: dict[str, str]
) -> list[_Row]:
    """Read the rows of a file; `texts` caches rendered texts by the repr of their messages, across files."""
    rows = []
    needed, named_by = ["data_source", prompt_column, "reward_model"], {prompt_column: "data.prompt_column"}
    for number, row in read_rows(file, needed, ["extra_info"], named_by):
        where = f"row {number} (from 0) of {file}"
        column = f"{where}, column {prompt_column!r}"
        messages = check_prompt(row[prompt_column], column)
        reward_model, extra_info = row["reward_model"], row.get("extra_info") or {}
        if not isinstance(row["data_source"], str):
            raise UserError(f"{where}: column 'data_source' must be a text, found {row['data_source']!r}")
        if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
            raise UserError(f"{where}: column 'reward_model' must hold a 'ground_truth', found {reward_model!r}")
        if not isinstance(extra_info, Mapping):
            raise UserError(f"{where}: column 'extra_info' must be a struct of named values, found {extra_info!r}")
        said = repr(messages)
        if said not in texts:
            chat = with_calls(tokenizer, messages, column)
            texts[said] = render(tokenizer, chat, where, add_generation_prompt=True)
        rows.append(_Row(where, texts[said], row["data_source"], reward_model["ground_truth"], extra_info))
    return rows
