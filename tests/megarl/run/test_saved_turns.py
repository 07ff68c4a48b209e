"""Turns in a checkpoint: read again they are what they were, and writing them takes next to no memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megarl.data import Turn
from megarl.data.packed_stretches import packed
from megarl.run.checkpoint_files import at_once
from megarl.run.saved_turns import SavedTurns, described, save_turns

RECORD_BYTES = 384


def turn_of(prompt: int, tokens: int, *, pieces: int = 0) -> Turn:
    """A turn of random numbers, with the records of its experts in some pieces."""
    random = np.random.default_rng(prompt + tokens)
    records = random.bytes(RECORD_BYTES * (prompt + tokens)) if pieces else b""
    experts = np.array_split(np.frombuffer(records, f"V{RECORD_BYTES}"), pieces) if pieces else []
    token_ids, log_probs = random.integers(1000, size=tokens), random.random(tokens)
    return Turn.of(range(prompt), token_ids, log_probs, np.arange(tokens) // 100, "stop", tuple(experts))


@pytest.mark.usefixtures("shared_cluster")
def test_turns_of_all_kinds_are_read_as_they_were_saved(tmp_path) -> None:
    kinds = [turn_of(3, 5), turn_of(0, 1, pieces=1), turn_of(2, 300, pieces=4), turn_of(40, 0, pieces=2)]
    turns = [each for tokens in range(20) for each in (turn_of(7, tokens, pieces=tokens % 2), *kinds)]
    save_turns(turns, "turns", at_once(tmp_path))
    saved = SavedTurns(tmp_path / "turns")
    assert [saved.next(described(turn)) for turn in turns] == turns


def test_a_hundred_megabytes_of_experts_are_saved_in_a_tenth_of_that(tmp_path) -> None:
    turns = [turn_of(100, 12_900, pieces=3) for _ in range(20)]
    tracemalloc.start()
    try:
        save_turns(turns, "turns", at_once(tmp_path))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "turns").stat().st_size > 100e6
    assert most_bytes < 10e6


@pytest.mark.usefixtures("shared_cluster")
def test_experts_that_are_read_are_in_the_object_store_and_not_in_this_process(tmp_path: Path) -> None:
    turns = [turn_of(100, 12_900, pieces=3) for _ in range(20)]
    save_turns(turns, "turns", at_once(tmp_path))
    before = own_memory()
    saved = SavedTurns(tmp_path / "turns")
    found = [saved.next(described(turn)) for turn in turns]
    assert own_memory() - before < 20e6
    sent = packed([turn.routed_experts for turn in found])
    assert (sent.long, len(sent.references)) == ([], 20), "a call of the ranks takes no copy of them"
    assert found[3] == turns[3]


def own_memory() -> int:
    """Bytes of this process that are in no file, and that it shares with no other."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def test_a_full_disk_is_an_error_that_a_checkpoint_has_a_sentence_for(tmp_path) -> None:
    # Whoever renames a finished file to this name replaces the link, and not the device.
    (tmp_path / "turns").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save_turns([turn_of(2, 3)], "turns", at_once(tmp_path))
