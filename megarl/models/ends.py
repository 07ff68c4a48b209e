"""End tokens of a model's responses: reading them from its folder, and adding some in an export."""

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from converters.durable import sync
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json

_GENERATION_CONFIG = "generation_config.json"


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """Ids of the tokens that end a response: the tokenizer's, those that files of the folder name, and `extra`."""
    return tuple(sorted({tokenizer.eos_token_id, *extra, *named_ends(folder)} - {None}))


def name_ends(folder: Path, ends: Iterable[int]) -> None:
    """Add end tokens to the generation_config.json of a model, durably."""
    file = folder / _GENERATION_CONFIG
    present = read_json(file) if file.exists() else {}
    named = list(dict.fromkeys([*named_ends(folder), *ends]))
    file.write_text(json.dumps({**present, "eos_token_id": named}, indent=2, ensure_ascii=False) + "\n")
    sync(file)
    sync(folder)


def named_ends(folder: Path) -> list[int]:
    """Ids of the end tokens in the files that an engine reads; the tokenizer's own is not added."""
    # Engines read config.json if generation_config.json is absent; SGLang always reads it.
    return _ends_in(folder / _GENERATION_CONFIG) or _ends_in(folder / CONFIG)


def _ends_in(file: Path) -> list[int]:
    """Read the end tokens that a file names; [] if it does not exist. Raises UserError for an invalid token id."""
    named = read_json(file).get("eos_token_id") if file.exists() else None
    ends = [end for end in (named if isinstance(named, list) else [named]) if end is not None]
    if wrong := [end for end in ends if type(end) is not int or end < 0]:
        raise UserError(f"{file} has eos_token_id {wrong[0]!r}, where the number of a token belongs; correct it")
    return ends
