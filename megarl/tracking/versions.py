"""The versions of all components that a run used."""

import platform
from importlib import metadata

from packaging.requirements import Requirement

_UNNAMED = ("megarl", "flash-attn")
"""Components that are not requirements of megarl."""


def versions() -> dict[str, str]:
    """Return {component: version} of Python, the system and every installed component, without importing any."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for part in (*_UNNAMED, *_required()):
        try:
            found[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return found


def _required() -> list[str]:
    """Everything that megarl requires, including the engines among its extras, except developer tools."""
    requirements = map(Requirement, metadata.requires("megarl") or [])
    return [
        each.name
        for each in requirements
        if each.marker is None or not each.marker.evaluate({"extra": "dev"}) or each.marker.evaluate({"extra": ""})
    ]
