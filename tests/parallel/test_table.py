"""The page of the layouts has a row for every layout that there is, and figures below the tolerance."""

import pytest
import table
from combinations import KINDS, layouts


def test_the_page_is_that_of_the_layouts() -> None:
    text = table.PAGE.read_text()
    figures = table.read(text)
    assert figures.keys() <= set(table.all_cells())
    assert max(figures.values()) <= table.TOLERANCE
    assert text == table.render(table.introduction_of(text), figures), "run make test-parallel ARGS=--page"


def test_a_page_is_read_by_the_columns_that_it_has() -> None:
    text = (
        "| row | figure |\n|---|---|\n| a | 1e-5 |\n\n| layout | MLA | dense |\n|---|---:|---:|\n| DP2 EP2 | 2e-6 |  |"
    )
    assert table.read(text) == {table.Cell("DP2 EP2", "MLA"): 2e-6}


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_that_of_a_layout(kind: str) -> None:
    named = {part for each in layouts(KINDS[kind]) for part in str(each).split()}
    names = {"TP": 8, "PP": 8, "DP": 8, "VPP": 7}
    names |= {} if KINDS[kind].shared_prefixes else {"CP": 8}
    names |= {"EP": 8, "ETP": 8} if KINDS[kind].experts else {}
    assert {f"{name}{size}" for name, largest in names.items() for size in range(2, largest + 1)} <= named


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "1e-9"), (1e-9, "1e-9"), (2e-6, "2e-6"), (2.01e-6, "3e-6"), (9.5e-7, "1e-6")]
)
def test_figures_are_rounded_up(value: float, shown: str) -> None:
    assert table._rounded_up(value) == shown
    assert float(shown) >= value
