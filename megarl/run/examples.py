"""Conversations that a run learns from, read as its model has them."""

from collections.abc import Sequence

from megarl.data import Conversation, load_conversations
from megarl.run.opening import RunSetup


def read_conversations(setup: RunSetup, files: Sequence[str], column: str, group: str) -> list[Conversation]:
    """The conversations in a column of parquet files, with ends of turns at which responses of the model end.

    Raises UserError as `load_conversations`; `group` is that of the keys which name files and column.
    """
    limit, model = setup.config.loop.max_tokens_per_micro_batch, setup.model
    return load_conversations(files, model.tokenizer, column, limit, group, model.stop_token_ids)
