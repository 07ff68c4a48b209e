"""The end of a log, for an error message."""

import errno
import os
from pathlib import Path

from megarl.process.logs import last_lines


def test_the_end_of_a_log_that_weeks_have_filled_is_read_alone(tmp_path):
    log = tmp_path / "trainer_3.log"
    log.touch()
    # With holes, which take no disk: nobody could read it whole.
    os.truncate(log, 8 * 1024**4)
    with log.open("a") as file:
        file.write("\n" + "".join(f"line {number}\n" for number in range(30)))
    assert last_lines(log, 3) == "line 27\nline 28\nline 29"


def test_a_log_without_a_line_says_so(tmp_path):
    assert last_lines(tmp_path / "absent.log") == "(no output)"
    (tmp_path / "empty.log").touch()
    assert last_lines(tmp_path / "empty.log") == "(no output)"


def test_a_log_of_another_user_hides_no_failure(tmp_path, monkeypatch):
    log = tmp_path / "trainer_0.log"
    log.touch()

    def refuse(*_arguments, **_options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    assert last_lines(log) == "(Permission denied)"
