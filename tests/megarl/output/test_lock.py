"""One run at a time in an output folder; the lock ends with the process, however that ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.output.lock import LOCK, sole_writer

HOLD = """
import sys
from pathlib import Path
from megarl.output.lock import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_and_told_who_the_first_is(holder, tmp_path):
    with (
        pytest.raises(UserError, match=rf"another run is writing .*run \(process {holder.pid} on "),
        sole_writer(tmp_path / "run"),
    ):
        pass
    with sole_writer(tmp_path / "other"):
        pass


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with sole_writer(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / LOCK).exists()


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with sole_writer(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays(tmp_path):
    with sole_writer(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").write_text("mine")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_place_that_cannot_be_a_folder():
    with pytest.raises(UserError, match="/proc/nothing cannot be written"), sole_writer(Path("/proc/nothing")):
        pass
