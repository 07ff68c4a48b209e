"""The page about the configuration is the one the schema makes, and says something about every key."""

from pathlib import Path

from megarl.config.keys import schema_keys
from megarl.config.reference import reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs`"


def test_every_key_is_explained() -> None:
    rows = {row.split("`")[1]: row for row in reference().splitlines() if row.startswith("| `")}
    elements = {key for key in rows if {"N", "NAME"} & set(key.split("."))}
    assert set(rows) - elements == set(schema_keys())
    assert {"teachers.NAME.path", "algorithm.corrections.N.kind", "reward.functions.NAME.weight"} <= elements
    assert [key for key, row in rows.items() if row.endswith("|  |")] == []
