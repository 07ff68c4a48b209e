"""The page of the layouts has a row for every layout that there is, and figures below the tolerance."""

import pytest
import table


def test_the_page_is_that_of_the_layouts() -> None:
    text = table.PAGE.read_text()
    figures = table.read(text)
    assert figures.keys() <= set(table.all_cells())
    assert max(figures.values()) <= table.TOLERANCE
    assert text == table.render(table.introduction_of(text), figures), "run make test-parallel ARGS=--page"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "1e-9"), (1e-9, "1e-9"), (2e-6, "2e-6"), (2.01e-6, "3e-6"), (9.5e-7, "1e-6")]
)
def test_figures_are_rounded_up(value: float, shown: str) -> None:
    assert table._rounded_up(value) == shown
    assert float(shown) >= value
