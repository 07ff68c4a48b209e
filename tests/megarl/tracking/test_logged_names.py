"""Metrics that the code logs are in the table: every text that reads like a metric's name."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from known_metrics import is_known

import megarl
from megarl.tracking.metrics import METRICS

GROUPS = {metric.name.split("/")[0] for metric in METRICS}
NAME = re.compile(rf"({'|'.join(sorted(GROUPS))})(/[a-z0-9_*]+)+")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names in texts; * stands for what a formatted one fills in."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if NAME.fullmatch(text):
            yield text


def is_in_the_table(name: str) -> bool:
    return is_known(name) or ("*" in name and any(fnmatchcase(metric.name, name) for metric in METRICS))


def test_names_are_found_in_texts_and_formatted_ones() -> None:
    source = 'a = {"policy/loss": 1, f"reward/part/{name}": 2, "policy/": 3, f"seconds/{x}/y": 4, "x/policy/loss": 5}'
    assert sorted(names_in(ast.parse(source))) == ["policy/loss", "reward/part/*", "seconds/*/y"]
    assert is_in_the_table("reward/part/*")
    assert not is_in_the_table("reward/par/*")
    assert not is_in_the_table("policy/los")


def test_every_name_that_is_logged_is_in_the_table() -> None:
    root = Path(megarl.__file__).parent
    found = {name: file.name for file in sorted(root.rglob("*.py")) for name in names_in(ast.parse(file.read_text()))}
    assert len(found) > 60
    assert {name: file for name, file in found.items() if not is_in_the_table(name)} == {}
