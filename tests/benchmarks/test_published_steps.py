"""Predicted steps of published runs are near the published ones, and the page shows the table that comes of them."""

from pathlib import Path

import pytest
from published_steps import RUNS, Run, predict, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} on {run.gpus} {run.device}")
def test_a_published_step_is_predicted_within_twice(run: Run) -> None:
    found = predict(run)
    assert 0.5 < found.step_seconds / run.seconds < 2
    assert found.fits, found.why_not()


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text()
