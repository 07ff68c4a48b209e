"""Checks a site-packages folder against a lock file, by version and by file."""

from __future__ import annotations

import csv
import re
from pathlib import Path


def canonical(name: str) -> str:
    """A distribution's name, normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Canonical name -> exact version, from lines `name==version`."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {canonical(name): version for name, version in (line.split("==") for line in lines if line)}


def same_version(wanted: str, found: str) -> bool:
    """Whether `found` is `wanted`, ignoring a local part such as +cpu."""
    return found == wanted or found.split("+")[0] == wanted


def find_distributions(site_packages: Path) -> dict[str, list[Path]]:
    """Canonical name -> its *.dist-info folders; a killed upgrade leaves more than one."""
    found: dict[str, list[Path]] = {}
    for folder in sorted(site_packages.glob("*.dist-info")):
        found.setdefault(canonical(folder.name[: -len(".dist-info")].split("-")[0]), []).append(folder)
    return found


def version_of(dist_info: Path) -> str:
    """The version in the name of a *.dist-info folder."""
    return dist_info.name[: -len(".dist-info")].split("-")[1]


def damaged_file(dist_info: Path) -> str | None:
    """The first file of a distribution that is missing or has a wrong size; None if all are right."""
    for needed in ("METADATA", "RECORD", "INSTALLER"):
        if not (dist_info / needed).is_file():
            return needed
    with (dist_info / "RECORD").open(newline="") as record:
        for path, _, size in csv.reader(record):
            if size and not path.endswith(".pyc"):
                file = dist_info.parent / path
                if not file.is_file() or file.stat().st_size != int(size):
                    return path
    return None


def find_fault(folders: list[Path], version: str | None) -> str | None:
    """Describe the fault of one distribution (`version` None: any version will do); None if it has none."""
    if not folders:
        return "missing"
    if len(folders) > 1:
        return "installed twice"
    found = version_of(folders[0])
    if version is not None and not same_version(version, found):
        return f"{found} instead of {version}"
    damaged = damaged_file(folders[0])
    return None if damaged is None else f"{damaged} is damaged"


def find_faults(site_packages: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Name -> fault, for every wanted distribution that has one."""
    found = find_distributions(site_packages)
    faults = {name: find_fault(found.get(name, []), version) for name, version in wanted.items()}
    return {name: fault for name, fault in faults.items() if fault is not None}
