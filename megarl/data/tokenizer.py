"""The tokenizer of a model: its files as they stand, and no code."""

from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import UserError
from converters.formats.safetensors import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS = "tokenizer_config.json"
_RULES = "tokenizer.json"


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a HuggingFace folder. Raises UserError where it is missing, damaged or code."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_rules = (folder / _RULES).is_file()
    if not has_rules and _is_code(folder):
        # transformers would read its words by the rules of another model, and say nothing.
        raise UserError(
            f"{folder} has no {_RULES}, and its tokenizer is code of its author (auto_map in {_SETTINGS}), which"
            f" is not run: make a {_RULES} once, as docs/data.md says under Tokenizers that are code"
        )
    # AutoTokenizer (transformers 5.19) takes the words of a tokenizer.json, but cuts and joins them by rules, if any,
    # of the class that the settings or the type of the model name: by Llama's, words of bytes lose all spaces.
    reader = PreTrainedTokenizerFast if has_rules else AutoTokenizer
    try:
        tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads them to
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]});"
            f" copy {_RULES} and {_SETTINGS} of the model there again"
        ) from error
    # Without its files transformers makes one that knows nothing but special tokens, if any.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        raise UserError(
            f"{folder} has no tokenizer that knows any word; copy {_RULES} and {_SETTINGS} of the model there"
        )
    return tokenizer


def _is_code(folder: Path) -> bool:
    """Whether the author of a tokenizer would have it read by a program beside it."""
    path = folder / _SETTINGS
    programs = read_json(path).get("auto_map") if path.is_file() else None
    return isinstance(programs, dict) and "AutoTokenizer" in programs
