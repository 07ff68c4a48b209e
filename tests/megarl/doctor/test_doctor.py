"""`megarl doctor` on the machine the tests run on."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.doctor.cluster_check import ClusterReport
from megarl.doctor.cluster_faults import Fault
from megarl.doctor.cluster_report import print_cluster
from megarl.doctor.findings import Finding
from megarl.doctor.inventory import PACKAGES, installed_version, take_inventory
from megarl.doctor.node_probe import Compute, Node
from megarl.doctor.report import print_report
from megarl.rollout.sglang.installation import PACKAGES as PACKAGES_OF_SGLANG
from megarl.rollout.sglang.installation import PYTHON_VARIABLE
from megarl.rollout.sglang.kind import VERSIONS


def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is (code == 0)
    assert report["cpu_cores"] == len(os.sched_getaffinity(0))
    assert set(report["packages"]) == set(PACKAGES)
    assert report["packages"]["torch"] == version("torch")
    assert report["unmet_requirements"] == []
    assert report["memory_bytes"] > report["memory_available_bytes"] > 0


def test_a_gpu_whose_memory_the_driver_does_not_know_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA GB10, [N/A]\\nH100, [GPU is lost]\\nH100, 81920\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    inventory = take_inventory()
    assert [gpu.memory_bytes for gpu in inventory.gpus] == [None, None, 80 * 1024**3]
    print_report(inventory, [])
    said = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA GB10 (memory unknown), H100 (memory unknown), H100 (80 GiB)" in said


@pytest.mark.parametrize(
    ("says", "failure"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Failed to initialize NVML: "),
        ("exit 9", "exit code 9"),
    ],
)
def test_an_nvidia_smi_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, failure: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{says}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    inventory = take_inventory()
    assert inventory.gpus == []
    assert inventory.gpu_failure.startswith(failure)
    tool.unlink()
    assert take_inventory().gpu_failure == ""


def test_names_are_whole_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    finding = Finding(False, "rollout.engine_args.a_name_longer_than_a_column", "because " * 60 + "so", "none")
    print_report(take_inventory(), [finding])
    said = capsys.readouterr().out
    assert finding.what in said
    assert finding.why in said
    node = Node("a-node-of-a-cluster-with-a-name-of-its-own", "10.0.0.1", {}, [], ())
    print_cluster(ClusterReport([node], [], []))
    assert node.name in capsys.readouterr().out


def test_a_cluster_with_warnings_alone_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Fault("n1", "1 GB/s go to n2", "see to the cables", refuses=False)
    print_cluster(ClusterReport([], [], [warning]))
    said = capsys.readouterr().out
    assert "Warnings" in said
    assert "Faults" not in said
    assert warning.what in said
    assert said.endswith("All 0 nodes are sound.\n")
    compute = [Compute("cuda:0", "H200", 1, 1, 700.0, is_right=True)]
    nodes = [Node("n1", "10.0.0.1", {}, compute, ()), Node("n2", "10.0.0.2", {}, [], ())]
    print_cluster(ClusterReport(nodes, [], []))
    verdict = "All 2 nodes are sound, but what computes on n2 is in use and was not measured.\n"
    assert capsys.readouterr().out.endswith(verdict)
    print_cluster(ClusterReport([], [], [warning, Fault("n2", "its clock is behind", "set it")]))
    assert capsys.readouterr().out.endswith("Not sound: n2.\n")


def test_an_engine_in_an_environment_of_its_own_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))

    def look() -> tuple[str | None, dict[str, str] | None]:
        main(["doctor", "--json"])
        report = json.loads(capsys.readouterr().out)
        found = (each for each in report["findings"] if each["what"] == "rollout.engine=sglang")
        return report["packages"]["sglang"], next(found, None)

    version_, finding = look()
    assert version_ is None
    assert finding is not None
    assert (finding["why"], finding["remedy"]) == (f"SGLang {VERSIONS[0]} is not installed", "make setup SGLANG=1")
    about = tmp_path / PACKAGES_OF_SGLANG / f"sglang-{VERSIONS[0]}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    (tmp_path / PACKAGES_OF_SGLANG / "sglang").mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSIONS[0]}\n")
    assert look() == (VERSIONS[0], None)
    # A Python of another environment.
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"sglang": "0.5.1"}'\n""")
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    version_, finding = look()
    assert version_ == "0.5.1"
    assert finding is not None
    assert finding["why"] == f"SGLang 0.5.1 is there, not {VERSIONS[0]}"
    # One that does not run.
    python.unlink()
    assert look()[0] is None


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
