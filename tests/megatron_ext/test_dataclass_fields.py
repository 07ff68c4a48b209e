"""Fields read from sources, on a package made for it."""

import sys
from pathlib import Path

import pytest

from megatron_ext.options.dataclass_fields import FieldType, read_fields

SOURCE = """
from dataclasses import dataclass, field
from typing import Callable, ClassVar, Literal, Optional, Union
import torch
from .base import Base, Colour, Mode
try:
    from .missing import Extra
except ImportError:
    pass

raise RuntimeError("this file is read, not run")

@dataclass
class Sample(Base, Unknown):
    count: int = 0
    share: "Optional[float]" = None
    mode: Literal["a", "b"] = "a"
    sizes: Optional[list[int]] = None
    either: Union[str, None, int] = None
    modern: float | None = None
    colour: Colour = Colour.red
    dtype: torch.dtype = torch.float32
    call: Callable = print
    named: Optional[Mode] = None
    some: Union[dict[str, int], Other] = None
    derived: int = field(init=False)
    shared: ClassVar[int] = 1
"""
BASE = """
import enum
class Colour(enum.Enum):
    red = 1
    blue = 2

Speed = Literal["slow", 3]
Mode = Literal["auto", Speed]

class Base:
    first: str
    count: str
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "megarl_sample_package" / "inner"
    folder.mkdir(parents=True)
    (folder / "sample.py").write_text(SOURCE)
    (folder / "base.py").write_text(BASE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "megarl_sample_package.inner.sample"


def test_names_types_and_bases(package: str) -> None:
    assert read_fields(package, "Sample") == {
        "first": FieldType(frozenset({"str"})),
        "count": FieldType(frozenset({"int"})),
        "share": FieldType(frozenset({"float", "None"})),
        "mode": FieldType(choices=("a", "b")),
        "sizes": FieldType(frozenset({"list", "None"}), items=FieldType(frozenset({"int"}))),
        "either": FieldType(frozenset({"str", "None", "int"})),
        "modern": FieldType(frozenset({"float", "None"})),
        "colour": FieldType(frozenset({"enum"}), ("red", "blue"), enum=("megarl_sample_package.inner.base", "Colour")),
        "dtype": FieldType(frozenset({"dtype"}), ("fp32", "bf16", "fp16", "fp8", "uint8")),
        "call": FieldType(is_open=True),
        "named": FieldType(frozenset({"None"}), ("auto", "slow", 3)),
        "some": FieldType(frozenset({"dict"}), is_open=True),
    }
    assert package not in sys.modules


def test_what_is_not_there(package: str) -> None:
    with pytest.raises(LookupError, match="no class Other"):
        read_fields(package, "Other")
    with pytest.raises(ModuleNotFoundError, match="megarl_absent_package"):
        read_fields("megarl_absent_package.inner", "Sample")
