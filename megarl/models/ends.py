"""Tokens at which responses of a model end: which its folder names, and how an export names more."""

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from converters.durable import sync
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json

_GENERATION_CONFIG = "generation_config.json"


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """Tokens at which responses of the model in a folder end, and the `extra` ones."""
    return tuple(sorted({tokenizer.eos_token_id, *extra, *named_ends(folder)} - {None}))


def name_ends(folder: Path, ends: Iterable[int]) -> None:
    """Have the generation_config.json of a model name more tokens at which its responses end."""
    file = folder / _GENERATION_CONFIG
    present = read_json(file) if file.exists() else {}
    named = list(dict.fromkeys([*named_ends(folder), *ends]))
    file.write_text(json.dumps({**present, "eos_token_id": named}, indent=2, ensure_ascii=False) + "\n")
    sync(file)
    sync(folder)


def named_ends(folder: Path) -> list[int]:
    """Tokens at which responses end by the files that an engine reads, whatever the tokenizer's own end is."""
    # Engines read config.json where generation_config.json is absent; SGLang does in any case.
    return _ends_in(folder / _GENERATION_CONFIG) or _ends_in(folder / CONFIG)


def _ends_in(file: Path) -> list[int]:
    """The end tokens that a file names, which may be absent."""
    named = read_json(file).get("eos_token_id") if file.exists() else None
    ends = [end for end in (named if isinstance(named, list) else [named]) if end is not None]
    if wrong := [end for end in ends if type(end) is not int or end < 0]:
        raise UserError(f"{file} has eos_token_id {wrong[0]!r}, where the number of a token belongs; correct it")
    return ends
