"""The process in which ranks are rehearsed, whatever lies in the folder that a command is called in."""

import signal

import pytest

from converters.errors import UserError
from megarl.rehearsal.own_process import call_apart


def test_it_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("def dumps(_value):\n    return 'of another'")
    monkeypatch.chdir(tmp_path)
    assert call_apart("json", "dumps", [1]) == "[1]"


def test_one_that_the_system_kills_is_said_to_lack_memory():
    with pytest.raises(
        UserError, match=r"killed the process of signal\.raise_signal, as it does where memory runs out"
    ):
        call_apart("signal", "raise_signal", signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with -11"):
        call_apart("signal", "raise_signal", signal.SIGSEGV)
