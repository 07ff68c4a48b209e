"""The table of a batch's fields: whole, enforced, and the one of the docs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.stages.fields import FIELDS, table, with_fields
from megatron_ext.packing import RaggedBatch

ROOT = Path(__file__).parents[3]
SOURCES = [
    *(ROOT / "megarl/stages").glob("*.py"),
    *(ROOT / "megarl/algorithms").rglob("*.py"),
    ROOT / "megarl/train.py",
]
NAMES = {field.name for field in FIELDS}


def fields_read(source: str) -> Iterator[str]:
    """The names in `x.fields["name"]`, `x.field("name")` and `x.constant("name")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "fields":
            if isinstance(node.slice, ast.Constant):
                yield node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("field", "constant", "split_field")
            yield from (each.value for each in node.args if asks and isinstance(each, ast.Constant))


def test_what_is_read_is_in_the_table() -> None:
    read = {name for file in SOURCES for name in fields_read(file.read_text())}
    assert len(read) > 8
    assert read <= NAMES


def test_what_is_in_the_table_is_made_where_it_says_and_named_elsewhere() -> None:
    table_itself = ROOT / "megarl/stages/fields.py"
    code = {file: file.read_text() for file in SOURCES if file != table_itself}
    functions = {
        node.name: (node, text)
        for file, text in code.items()
        if file.parent.name == "stages"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    for field in FIELDS:
        assert field.made_by in functions, field
        assert f"{field.name}=" in functions[field.made_by][1] or f'"{field.name}"' in functions[field.made_by][1], (
            field
        )
        assert sum(field.name in text for text in code.values()) >= 2, field


def test_a_field_is_known_and_of_its_type() -> None:
    batch = RaggedBatch(torch.tensor([1, 2]), torch.tensor([2]))
    assert with_fields(batch, weights=torch.ones(2)).fields["weights"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="no field 'wieghts'"):
        with_fields(batch, wieghts=torch.ones(2))
    with pytest.raises(ValueError, match=r"'weights' of a batch is torch\.float32, and not torch\.float64"):
        with_fields(batch, weights=torch.ones(2).double())


def test_the_docs_have_the_table() -> None:
    assert table() in (ROOT / "docs/concepts.md").read_text(), f"docs/concepts.md needs:\n{table()}"
