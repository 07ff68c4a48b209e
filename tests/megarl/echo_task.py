"""A task that a tiny model learns in seconds: the second digit of the question, three times."""

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.quickstart.arithmetic import question, split_pairs

CONVERSATIONS = "dialogue"
"""Column of the conversations."""


class EchoFiles(NamedTuple):
    """Conversations, and pairs whose rejected reply is the right one to another question."""

    train: Path
    eval: Path
    pairs_train: Path
    pairs_eval: Path


def write_echo(folder: Path, held_out: int = 64) -> EchoFiles:
    folder.mkdir()
    files = EchoFiles(*(folder / f"{name}.parquet" for name in EchoFiles._fields))
    for numbers, conversations, pairs in zip(split_pairs(0, held_out), files[:2], files[2:], strict=True):
        rows = [
            (question(number), str(number[0] % 10) * 3, str((number[0] + 1 + number[1] % 9) % 10) * 3)
            for number in numbers
        ]
        write(
            conversations, [{CONVERSATIONS: [say("user", asked), say("assistant", right)]} for asked, right, _ in rows]
        )
        write(
            pairs,
            [{"prompt": [say("user", asked)], "chosen": right, "rejected": wrong} for asked, right, wrong in rows],
        )
    return files


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write(path: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)
