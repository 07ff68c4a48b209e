import gc

import pytest

from megarl.process.loading import load


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(program)` writes a module and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(program: str) -> str:
        name = f"loaded_by_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(program)
        return name

    return write


def test_no_garbage_is_looked_for_while_a_program_is_imported(module):
    assert gc.isenabled()
    assert load(module("import gc\nlooked_for = gc.isenabled()"), "looked_for") is False
    assert gc.isenabled()


def test_a_program_that_cannot_be_imported_raises_and_garbage_is_looked_for_again(module):
    with pytest.raises(ZeroDivisionError):
        load(module("1 / 0"), "anything")
    assert gc.isenabled()
