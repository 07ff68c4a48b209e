"""Loading of a model's tokenizer from its files, without running code of theirs."""

from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import UserError
from converters.formats.safetensors import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS = "tokenizer_config.json"
_RULES = "tokenizer.json"


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a HuggingFace folder. Raises UserError if it is missing, damaged or remote code."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_rules = (folder / _RULES).is_file()
    if not has_rules and _is_code(folder):
        # transformers would silently apply the rules of another model to its vocabulary.
        raise UserError(
            f"{folder} has no {_RULES}, and its tokenizer is code of its author (auto_map in {_SETTINGS}), which"
            f" is not run: make a {_RULES} once, as docs/data.md says under Tokenizers that are code"
        )
    # AutoTokenizer (transformers 5.19) takes the vocabulary from tokenizer.json, but may split and join by the rules of
    # the class that the settings or the model type name: with Llama's rules, a byte-level vocabulary loses all spaces.
    reader = PreTrainedTokenizerFast if has_rules else AutoTokenizer
    try:
        tokenizer = reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged file makes transformers and tokenizers raise anything
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]});"
            f" copy {_RULES} and {_SETTINGS} of the model there again"
        ) from error
    # If files are missing, transformers returns a tokenizer that knows only special tokens, if any.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        raise UserError(
            f"{folder} has no tokenizer that knows any word; copy {_RULES} and {_SETTINGS} of the model there"
        )
    return tokenizer


def _is_code(folder: Path) -> bool:
    """Whether the tokenizer's settings name remote code to load it."""
    path = folder / _SETTINGS
    programs = read_json(path).get("auto_map") if path.is_file() else None
    return isinstance(programs, dict) and "AutoTokenizer" in programs
