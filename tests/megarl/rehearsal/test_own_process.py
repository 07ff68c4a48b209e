"""The process in which ranks are rehearsed, whatever lies in the folder that a command is called in."""

from megarl.rehearsal.own_process import call_apart


def test_it_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("def dumps(_value):\n    return 'of another'")
    monkeypatch.chdir(tmp_path)
    assert call_apart("json", "dumps", [1]) == "[1]"
