"""Evaluates arithmetic of a shell script."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from megarl.config.foreign.shell_conditions import NUMBER
from megarl.config.foreign.shell_words import Word


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def evaluate(text: str, variable: Callable[[str], Word | None]) -> int | None:
    """The value of the text in `$((...))`; None if it is unknown."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=number) if type(number) is int:
                return number
            # Bash reads a number with a leading 0 as octal.
            case ast.Name(id=name) if (found := variable(name)) and NUMBER.fullmatch(found.text):
                return int(found.text)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
                return _OPERATIONS[type(operation)](value(left), value(right))
        raise ValueError(text)

    try:
        return value(ast.parse(re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip(), mode="eval"))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
