"""Write docs/configuration.md from the schema: `python -m megarl.config.reference docs/configuration.md`."""

import ast
import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import omegaconf

from megarl.config import schema
from megarl.config.schema import MegarlConfig

_HEADER = """# Configuration

Made from `megarl/config/schema.py` by `make docs`; change it there.

A run is a recipe of `configs/` with overrides: `megarl train --config-name NAME KEY=VALUE ...`. Options of Megatron
(`megatron.*`) may also be given as Megatron's own flags: `--tensor-model-parallel-size 8`. A recipe of your own lies in
any folder (`--config-dir`) and may begin with `defaults: [grpo_qwen3_moe, _self_]`. `--print-config` shows what comes
out. Keys marked *required* have no default.
"""
_TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def reference() -> str:
    """The whole page, in Markdown."""
    groups = [field for field in fields(MegarlConfig) if _is_group(field.type)]
    lines = [_HEADER, "## The run", "", *_TABLE, *_rows(MegarlConfig, "")]
    for group in groups:
        assert isinstance(group.type, type)
        lines += ["", f"## {group.name}", "", inspect.cleandoc(group.type.__doc__ or ""), ""]
        lines += [*_TABLE, *_rows(group.type, f"{group.name}.")]
    return "\n".join(lines) + "\n"


def _rows(group: type, prefix: str) -> list[str]:
    meanings = _meanings(group)
    return [
        f"| `{prefix}{field.name}` | {_type_name(field.type)} | {_default(field)} | {meanings.get(field.name, '')} |"
        for field in fields(group)
        if not _is_group(field.type)
    ]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _type_name(kind: Any) -> str:
    name = kind.__name__ if kind in (str, int, float, bool) else str(kind).replace("typing.", "")
    return name.replace("|", "\\|")


def _default(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    return "*required*" if value == omegaconf.MISSING else f"`{value!r}`"


def _meanings(group: type) -> dict[str, str]:
    """Field -> the string below it in the source, on one line."""
    tree = ast.parse(inspect.getsource(schema))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == group.__name__)
    meanings = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            meanings[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split()).replace("|", "\\|")
    return meanings


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
