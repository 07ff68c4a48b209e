"""Reads the fields of an installed dataclass from its source, since importing Megatron or an engine takes seconds."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PLAIN = {"bool", "int", "float", "str", "dict", "None"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8", "uint8": "uint8"}
"""Short name of a dtype -> its name in torch; the optimizers of Megatron-LM and Transformer Engine call FP8 uint8."""
_LISTS = {"list", "List", "tuple", "Tuple", "Sequence"}


@dataclass(frozen=True)
class FieldType:
    """The plain values that a field accepts."""

    kinds: frozenset[str] = frozenset()
    """Kinds among bool, int, float, str, dict, None, list, dtype (a torch dtype, by its short name) and enum (a member,
    by its name); empty if the field only accepts `choices`, or objects that have no plain form."""
    choices: tuple[Any, ...] = ()
    """Values of a `Literal`, or names of an enum's members."""
    items: "FieldType | None" = None
    """Type of a list's items."""
    enum: tuple[str, str] | None = None
    """Module and name of the enum."""
    is_open: bool = False
    """Whether it may accept other values, too, since a part of its annotation is not understood here."""

    def __or__(self, other: "FieldType") -> "FieldType":
        return FieldType(
            self.kinds | other.kinds,
            self.choices + other.choices,
            self.items or other.items,
            self.enum or other.enum,
            self.is_open or other.is_open,
        )

    def __str__(self) -> str:
        words = {"None": "null", "list": "a list", "dtype": "", "enum": ""}
        parts = [*map(str, self.choices), *(words.get(kind, kind) for kind in sorted(self.kinds))]
        return " or ".join(part for part in parts if part)

    def convert(self, value: Any) -> Any:
        """Convert `value` to this type. Raises ValueError if that is not possible."""
        if value is None and "None" in self.kinds:
            return None
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return value
        if isinstance(value, bool):
            if "bool" in self.kinds:
                return value
        elif isinstance(value, int | float):
            if "int" in self.kinds and value % 1 == 0:
                return int(value)
            if "float" in self.kinds:
                return float(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if "list" in self.kinds:
                return [self.items.convert(item) for item in value] if self.items else list(value)
        elif type(value).__name__ in self.kinds:
            return value
        raise ValueError(f"takes {self}" if str(self) else "cannot be given as a plain value")


_UNKNOWN = FieldType(is_open=True)


@cache
def read_fields(module: str, class_name: str) -> dict[str, FieldType]:
    """Name -> type of the init fields of a dataclass, its bases' first.

    Raises LookupError if the module has no such class, and ModuleNotFoundError if it is not installed.
    """
    where, definition = _find(module, class_name)
    if not isinstance(definition, ast.ClassDef):
        raise LookupError(f"{module} has no class {class_name}")
    fields: dict[str, FieldType] = {}
    for base in definition.bases:
        if isinstance(base, ast.Name) and isinstance(_find(where, base.id)[1], ast.ClassDef):
            fields |= read_fields(where, base.id)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_init_field(node):
            fields[node.target.id] = _field_type(where, node.annotation)
    return fields


def _is_init_field(node: ast.AnnAssign) -> bool:
    if "ClassVar" in ast.unparse(node.annotation):
        return False
    keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(k.arg == "init" and ast.unparse(k.value) == "False" for k in keywords)


def _field_type(module: str, annotation: ast.expr) -> FieldType:
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            return _field_type(module, ast.parse(annotation.value, mode="eval").body)
        return FieldType(frozenset({"None"})) if annotation.value is None else _UNKNOWN
    if isinstance(annotation, ast.BinOp):
        return _field_type(module, annotation.left) | _field_type(module, annotation.right)
    if isinstance(annotation, ast.Subscript):
        return _generic_type(module, ast.unparse(annotation.value).split(".")[-1], annotation.slice)
    if ast.unparse(annotation) == "torch.dtype":
        return FieldType(frozenset({"dtype"}), tuple(DTYPES))
    return _named_type(module, annotation.id) if isinstance(annotation, ast.Name) else _UNKNOWN


def _generic_type(module: str, name: str, argument: ast.expr) -> FieldType:
    arguments = argument.elts if isinstance(argument, ast.Tuple) else [argument]
    if name == "Literal":
        return _literal(module, arguments)
    if name == "Optional":
        return _field_type(module, argument) | FieldType(frozenset({"None"}))
    if name == "Union":
        union = FieldType()
        for member in arguments:
            union |= _field_type(module, member)
        return union
    if name in _LISTS:
        return FieldType(frozenset({"list"}), items=_field_type(module, arguments[0]))
    return FieldType(frozenset({"dict"})) if name in {"dict", "Dict"} else _UNKNOWN


def _literal(module: str, values: Sequence[ast.expr]) -> FieldType:
    """The type of a `Literal`, whose values may include other literals."""
    literal = FieldType()
    for value in values:
        constant = isinstance(value, ast.Constant)
        literal |= FieldType(choices=(ast.literal_eval(value),)) if constant else _field_type(module, value)
    return literal


def _named_type(module: str, name: str) -> FieldType:
    if name in _PLAIN:
        return FieldType(frozenset({name}))
    if name in _LISTS:
        return FieldType(frozenset({"list"}))
    where, definition = _find(module, name)
    if isinstance(definition, ast.ClassDef) and any(ast.unparse(b).endswith("Enum") for b in definition.bases):
        members = (node.targets[0] for node in definition.body if isinstance(node, ast.Assign))
        names = tuple(member.id for member in members if isinstance(member, ast.Name))
        return FieldType(frozenset({"enum"}), names, enum=(where, name))
    if isinstance(definition, ast.Assign) and isinstance(definition.value, ast.Subscript):
        return _field_type(where, definition.value)
    return _UNKNOWN


def _find(module: str, name: str) -> tuple[str, ast.AST | None]:
    """Find the definition of `name` in `module`, following imports within the same package."""
    for node in _statements(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            package = module.rpartition(".")[0]
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if source.split(".")[0] == module.split(".")[0]:
                return _find(source, name)
    return module, None


@cache
def _statements(module: str) -> tuple[ast.stmt, ...]:
    """The top-level statements of a module, including those under `if` and `try`."""

    def flatten(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for node in statements:
            yield node
            if isinstance(node, ast.If | ast.Try):
                yield from flatten(node.body)

    return tuple(flatten(ast.parse(_source_file(module).read_text()).body))


def _source_file(module: str) -> Path:
    """The file of a module, found without importing the packages that contain it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise ModuleNotFoundError(f"{module} is not installed", name=module)
