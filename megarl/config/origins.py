"""Tells where each value of a configuration comes from: a file's line, an override, a flag, or the schema's default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl.config.assignment import Assignment
from megarl.config.compose import chooses_file, compose, files_of, open_keys
from megarl.config.folder import recipes_folder
from megarl.schema import MegarlConfig

DEFAULT = "default"
OPEN = "???"
"""OmegaConf's value of a mandatory key that has not been set."""
_DEDUCED = "follows from other keys"


@dataclass(frozen=True)
class Setting:
    """The value of a key, and the place where it was set."""

    value: Any
    origin: str


def explain(config_name: str, assignments: Sequence[Assignment], config_dir: str | None) -> dict[str, Setting]:
    """Dotted key -> its value in the checked configuration and its origin; mandatory keys may be open.

    Raises UserError as `compose` does.
    """
    config, open_ = compose_open(config_name, [each.text for each in assignments], config_dir)
    given = _origins(config_name, assignments, config_dir)
    settings = {}
    for key, value in leaves(asdict(config)):
        if key in open_:
            settings[key] = Setting(OPEN, "open")
            continue
        origin = _origin(key, given)
        if origin == DEFAULT and value != defaults().get(key, value):
            origin = _DEDUCED
        settings[key] = Setting(value, origin)
    return settings


def compose_open(config_name: str, overrides: Sequence[str], config_dir: str | None) -> tuple[MegarlConfig, list[str]]:
    """Compose with placeholders for open keys; also returns these keys. Raises UserError as `compose` does."""
    open_ = open_keys(config_name, overrides, config_dir)
    stand_ins = [f"{key}={_stand_in(defaults().get(key, OPEN))}" for key in open_]
    return compose(config_name, [*overrides, *stand_ins], config_dir), open_


def _stand_in(default: Any) -> str:
    return "[]" if isinstance(default, list) else "to_be_given" if isinstance(default, str) else "1"


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a group; lists and empty groups are values."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


@cache
def defaults() -> Mapping[str, Any]:
    """Dotted key -> the value that it has where nothing sets it."""
    return dict(leaves(asdict(MegarlConfig())))


def _origin(key: str, given: Mapping[str, str]) -> str:
    """The origin of the key, or else of the nearest enclosing group that was set as one value."""
    while key:
        if key in given:
            return given[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def _origins(config_name: str, assignments: Sequence[Assignment], config_dir: str | None) -> dict[str, str]:
    """Key -> the place where it was last set."""
    found: dict[str, str] = {}
    for file, group in files_of(config_name, [each.text for each in assignments], config_dir):
        found |= {key: f"{_shown(file)}:{line}" for key, line in _lines_of_file(file, f"{group}." if group else "")}
    for assignment in assignments:
        override = OverridesParser.create().parse_override(assignment.text)
        if chooses_file(override):
            continue
        key = override.key_or_group
        value = None if override.is_delete() else override.value()
        # A mapping is merged into the existing values, key by key; a list replaces them.
        given = dict(leaves(value, f"{key}.")) if isinstance(value, Mapping) and value else {key: value}
        found |= dict.fromkeys(given, assignment.origin)
    return found


def _shown(file: Path) -> str:
    home = recipes_folder()
    return f"configs/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)


def _lines_of_file(file: Path, prefix: str) -> Iterator[tuple[str, int]]:
    root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    return _lines(root, prefix) if isinstance(root, yaml.MappingNode) else iter(())


def _lines(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _lines(value, f"{key}.")
        else:
            yield key, name.start_mark.line + 1
