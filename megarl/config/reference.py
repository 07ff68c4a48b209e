"""Writes docs/configuration.md from the schema: `python -m megarl.config.reference docs/configuration.md`."""

import ast
import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import omegaconf

from megarl.schema import MegarlConfig

_HEADER = """# Configuration

Made from the files of `megarl/schema/` by `make docs`; change them.

A run is a recipe of `configs/` with overrides: `megarl train --config-name NAME KEY=VALUE ...`. Options of Megatron
(`megatron.*`) may also be given as Megatron's own flags: `--tensor-model-parallel-size 8`. A recipe of your own lies in
any folder (`--config-dir`) and may begin with `defaults: [grpo_qwen3_moe, _self_]`. `--print-config` shows what comes
out. Keys marked *required* have no default.
"""
_TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def reference() -> str:
    """The whole page, in Markdown."""
    groups = [field for field in fields(MegarlConfig) if _is_group(field.type)]
    lines = [_HEADER, "## The run", "", *_TABLE, *_rows(MegarlConfig, ""), *_elements(MegarlConfig, "")]
    for group in groups:
        assert isinstance(group.type, type)
        lines += ["", f"## {group.name}", "", inspect.cleandoc(group.type.__doc__ or ""), ""]
        lines += [*_TABLE, *_rows(group.type, f"{group.name}.")]
        lines += _elements(group.type, f"{group.name}.")
    return "\n".join(lines) + "\n"


def _rows(group: type, prefix: str) -> list[str]:
    meanings = _meanings(group)
    return [
        f"| `{prefix}{field.name}` | {_type_name(field.type)} | {_default(field)} | {meanings.get(field.name, '')} |"
        for field in fields(group)
        if not _is_group(field.type)
    ]


def _elements(group: type, prefix: str) -> list[str]:
    """A table for each field that is a list or a mapping of groups."""
    lines = []
    for field in fields(group):
        for element in filter(_is_group, get_args(field.type)):
            place = "N" if get_origin(field.type) is list else "NAME"
            key = f"{prefix}{field.name}.{place}"
            lines += ["", f"### {key}", "", inspect.cleandoc(element.__doc__ or ""), ""]
            lines += [*_TABLE, *_rows(element, f"{key}.")]
    return lines


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _type_name(kind: Any) -> str:
    name = kind.__name__ if kind in (str, int, float, bool) else str(kind).replace("typing.", "")
    name = re.sub(r"megarl\.[\w.]+\.", "", name)
    return name.replace("|", "\\|")


def _default(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    return "*required*" if value == omegaconf.MISSING else f"`{value!r}`"


def _meanings(group: type) -> dict[str, str]:
    """Field -> the docstring below it in the source, on one line."""
    (definition,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {}
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            meanings[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split()).replace("|", "\\|")
    return meanings


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
