"""Conversations that a run trains on: tokenized for its model, and the tokens that end their turns."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megarl.data import Conversation, load_conversations
from megarl.data.turn_ends import ends_of
from megarl.models.ends import named_ends, stop_token_ids
from megarl.run.opening import RunSetup


def read_conversations(setup: RunSetup, files: Sequence[str], column: str, group: str) -> list[Conversation]:
    """Load the conversations in a column of parquet files, tokenized for the model.

    `group` is the configuration group that names files and column, for messages. Raises UserError as
    `load_conversations`.
    """
    limit, model = setup.config.loop.max_tokens_per_micro_batch, setup.model
    return load_conversations(files, model.tokenizer, column, limit, group, model.stop_token_ids)


def with_ends_of(examples: Iterable[Conversation], setup: RunSetup) -> RunSetup:
    """Add the tokens that end turns of the examples to the run's stop tokens and to those its export names.

    The chat template may end turns with a token that does not end responses of the model, as with a base model. Without
    this, the exported model would go on after each reply up to the length limit. Prints a warning if it adds any.
    """
    model = setup.model
    ends = ends_of(examples)
    # Compared with the files alone: engines also stop at the tokenizer's end token, but transformers does not.
    setup = replace(setup, learned_ends=tuple(sorted(ends.difference(named_ends(model.folder)))))
    learned = sorted(ends.difference(stop_token_ids(model.folder, model.tokenizer)))
    if not learned:
        return setup
    tokens = ", ".join(f"{model.tokenizer.convert_ids_to_tokens(end)} ({end})" for end in learned)
    print(
        f"warning: turns of the examples end with {tokens}, at which no response of {model.folder} ends: the model that"
        f" this run writes gets {learned} added to eos_token_id in its generation_config.json. Add it there in"
        f" {model.folder}, too, for that model itself, for an adapter to it, and for what megarl export makes of a"
        " checkpoint",
        file=sys.stderr,
        flush=True,
    )
    stops = tuple(sorted({*model.stop_token_ids, *learned}))
    return replace(setup, model=replace(model, stop_token_ids=stops))
