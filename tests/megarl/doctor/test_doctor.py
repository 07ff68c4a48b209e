"""`megarl doctor` on the machine the tests run on."""

import json
import os
from importlib.metadata import version

import pytest

from megarl.cli.main import main
from megarl.doctor.inventory import PACKAGES, installed_version


def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is (code == 0)
    assert report["cpu_cores"] == len(os.sched_getaffinity(0))
    assert set(report["packages"]) == set(PACKAGES)
    assert report["packages"]["torch"] == version("torch")
    assert report["unmet_requirements"] == []
    assert report["memory_bytes"] > report["memory_available_bytes"] > 0


def test_the_report_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert "megatron-core" in text
    assert version("megatron-core") in text
    assert text.endswith("The main job can run here.\n" if code == 0 else "The main job cannot run here.\n")


def test_exit_code_1_where_the_job_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.doctor.inventory._can_listen", lambda: False)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("The main job cannot run here.\n")


def test_an_absent_package_has_no_version() -> None:
    assert installed_version("megarl-absent-package") is None
