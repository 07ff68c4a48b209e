"""Which version of every part a run used."""

import platform
from importlib import metadata

from packaging.requirements import Requirement

_UNNAMED = ("megarl", "flash-attn")
"""Parts that are no requirement of megarl."""


def versions() -> dict[str, str]:
    """Return {part: version} of Python, the system and every installed part, without importing any."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for part in (*_UNNAMED, *_required()):
        try:
            found[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return found


def _required() -> list[str]:
    """All that megarl requires, the engines among its extras too, but for the tools of its developers."""
    requirements = map(Requirement, metadata.requires("megarl") or [])
    return [
        each.name
        for each in requirements
        if each.marker is None or not each.marker.evaluate({"extra": "dev"}) or each.marker.evaluate({"extra": ""})
    ]
