"""The end of a log, for an error message."""

import os

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
