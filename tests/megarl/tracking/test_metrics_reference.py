from pathlib import Path

from megarl.tracking.metrics import METRICS
from megarl.tracking.reference import reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `python -m megarl.tracking.reference docs/metrics.md`"


def test_every_metric_is_one_row_of_three_cells() -> None:
    rows = [row for row in reference().splitlines() if row.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [metric.name for metric in METRICS]
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)
