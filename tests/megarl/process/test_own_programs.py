"""Programs that lie beside Python are found by all that megarl starts, also where nobody activated the environment."""

import os
import sys
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.process.own_programs import with_programs_of


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "/venv/bin"),
        ({"PATH": "/usr/bin:/bin"}, "/venv/bin:/usr/bin:/bin"),
        ({"PATH": "/usr/bin:/venv/bin:/bin"}, "/venv/bin:/usr/bin:/bin"),
    ],
)
def test_a_path_has_them_first_and_once(given: dict[str, str], path: str) -> None:
    assert with_programs_of("/venv/bin/python", given) == path


def test_every_command_begins_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    main(["inspect", "nowhere"])
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
