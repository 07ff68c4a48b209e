"""Conversations that a run learns from: read as its model has them, and where their turns end."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megarl.data import Conversation, load_conversations
from megarl.data.turn_ends import ends_of
from megarl.models.ends import named_ends, stop_token_ids
from megarl.run.opening import RunSetup


def read_conversations(setup: RunSetup, files: Sequence[str], column: str, group: str) -> list[Conversation]:
    """The conversations in a column of parquet files, with ends of turns at which responses of the model end.

    Raises UserError as `load_conversations`; `group` is that of the keys which name files and column.
    """
    limit, model = setup.config.loop.max_tokens_per_micro_batch, setup.model
    return load_conversations(files, model.tokenizer, column, limit, group, model.stop_token_ids)


def with_ends_of(examples: Iterable[Conversation], setup: RunSetup) -> RunSetup:
    """The setup of a run that learns to end turns as the examples do.

    Ends at which no response of the model ends, as those of a chat template beside a base model, end the responses of
    the run, and its export names them; that is said on standard error. Without them the model that is written would
    go on after each reply, for as long as it may.
    """
    model = setup.model
    ends = ends_of(examples)
    # Engines stop at the tokenizer's end, too; whoever generates with transformers reads the files alone.
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
