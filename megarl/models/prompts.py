"""Prompts of a run, as its model takes them."""

import sys
from collections.abc import Sequence

from megarl.data import Prompt, load_prompts
from megarl.models.context import check_context
from megarl.models.policy import Model
from megarl.schema import MegarlConfig


def read_prompts(files: Sequence[str], model: Model, config: MegarlConfig) -> list[Prompt]:
    """The prompts of `files`; how many are left out for their length is said on standard error.

    Raises UserError as `load_prompts` and `check_context` do.
    """
    found = load_prompts(files, model.tokenizer, config.data)
    if found.dropped:
        limit = config.data.max_prompt_tokens
        said = f"{found.dropped} prompts of {', '.join(files)} are longer than {limit} tokens and are left out"
        print(said, file=sys.stderr, flush=True)
    check_context(config, (prompt.token_ids for prompt in found.prompts))
    return found.prompts
