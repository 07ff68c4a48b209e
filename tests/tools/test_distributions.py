"""Every way in which an installed distribution can differ from the lock is noticed."""

from pathlib import Path

import pytest
from distributions import find_faults, read_lock, same_version


def put_distribution(site_packages: Path, name: str, version: str) -> Path:
    """A distribution of one module with all its records; returns its folder of records."""
    module = site_packages / f"{name.lower()}.py"
    module.write_text("x = 1\n")
    dist_info = site_packages / f"{name}-{version}.dist-info"
    dist_info.mkdir()
    for file in ("METADATA", "INSTALLER"):
        (dist_info / file).write_text("text\n")
    record = [f"{module.name},sha256=abc,6", f"{dist_info.name}/METADATA,sha256=abc,5", f"{dist_info.name}/RECORD,,"]
    (dist_info / "RECORD").write_text("\n".join([*record, f"__pycache__/{name}.pyc,,10"]))
    return dist_info


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    put_distribution(tmp_path, "Some_Package", "1.2")
    put_distribution(tmp_path, "torch", "2.13.0+cpu")
    return tmp_path


WANTED = {"some-package": "1.2", "torch": "2.13.0"}


def test_what_is_as_it_should_be_has_no_fault(site_packages: Path) -> None:
    assert find_faults(site_packages, WANTED) == {}


def test_a_missing_and_another_version(site_packages: Path) -> None:
    wanted = {**WANTED, "some-package": "1.3", "absent": "1"}
    assert find_faults(site_packages, wanted) == {"some-package": "1.2 instead of 1.3", "absent": "missing"}


def test_a_file_that_is_gone_or_cut_short(site_packages: Path) -> None:
    (site_packages / "torch.py").unlink()
    (site_packages / "some_package.py").write_text("x")
    faults = {"some-package": "some_package.py is damaged", "torch": "torch.py is damaged"}
    assert find_faults(site_packages, WANTED) == faults


@pytest.mark.parametrize("record", ["METADATA", "RECORD", "INSTALLER"])
def test_records_that_a_killed_install_leaves_out(site_packages: Path, record: str) -> None:
    (site_packages / "torch-2.13.0+cpu.dist-info" / record).unlink()
    assert find_faults(site_packages, WANTED) == {"torch": f"{record} is damaged"}


def test_two_versions_that_a_killed_upgrade_leaves(site_packages: Path) -> None:
    put_distribution(site_packages, "some_package", "1.1")
    assert find_faults(site_packages, WANTED) == {"some-package": "installed twice"}


def test_compiled_files_do_not_matter(site_packages: Path) -> None:
    (site_packages / "__pycache__").mkdir()
    (site_packages / "__pycache__" / "torch.pyc").write_text("another size")
    assert find_faults(site_packages, WANTED) == {}


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0", "2.13.1+cpu", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
    ],
)
def test_local_versions(wanted: str, found: str, same: bool) -> None:
    assert same_version(wanted, found) is same


def test_reading_a_lock(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text("# why\nSome_Package==1.2  # reason\n\nother.name==3+cpu\n")
    assert read_lock(tmp_path / "lock.txt") == {"some-package": "1.2", "other-name": "3+cpu"}
