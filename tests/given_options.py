"""The options that a program gives: in calls, tables, overrides and flags, and not where it only speaks of them."""

import ast
import re
from collections.abc import Iterator

_GIVEN = re.compile(r"^[+\w.]*\b(\w+)=|[{,] *\"?(\w+)\"?:|^--([a-z0-9-]+)")


def given_options(source: str) -> set[str]:
    """Names of keywords, keys of tables, and those in texts such as "megatron.name=1", "{name: 1}" or "--name"."""
    tree = ast.parse(source)
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {name for node in ast.walk(tree) if id(node) not in idle for name in _names(node)}


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.keyword(arg=str(name)):
            yield name
        case ast.Dict(keys=keys):
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        case ast.Constant(value=str(text)):
            yield from (name.replace("-", "_") for names in _GIVEN.findall(text) for name in names if name)
