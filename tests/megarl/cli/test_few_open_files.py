"""Checkpoints of more files than a process may have open, which is where the soft limit is that no program raises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_model

pytestmark = pytest.mark.long
# 64 ranks, each with two files, and as many shards.
WIDE = {"num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
SIZES = ("--tp", "4", "--pp", "16", "--make-vocab-size-divisible-by", "1")
MOST_OPEN = 110
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({MOST_OPEN}, {MOST_OPEN}))
from megarl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def megarl(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def facts(*words: object) -> dict:
    done = megarl(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in HuggingFace form, converted, and exported from there."""
    root = tmp_path_factory.mktemp("few_open_files")
    found = {name: root / name for name in ("model", "megatron", "back")}
    write_model(found["model"], **WIDE)
    assert facts("convert", "--hf", found["model"], "--out", found["megatron"], *SIZES)["files"] > MOST_OPEN
    words = ("--megatron", found["megatron"], "--out", found["back"], "--shard-size", "1kB")
    assert facts("export", *words)["files"] > MOST_OPEN
    return found


def test_they_are_compared(folders: dict[str, Path]) -> None:
    assert facts("diff", folders["megatron"], folders["back"])["same"]


def test_they_are_verified_by_the_checksums_of_their_chunks(folders: dict[str, Path]) -> None:
    (folders["megatron"] / "megarl_manifest.json").unlink()
    assert facts("verify", folders["megatron"])["intact"]
