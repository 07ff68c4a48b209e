from pathlib import Path

from known_metrics import is_known

from megarl.diagnostics.alerts import ALERTS
from megarl.diagnostics.reference import reference
from megarl.tracking.metrics import METRICS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `python -m megarl.diagnostics.reference docs/metrics.md`"


def test_every_metric_is_one_row_of_three_cells() -> None:
    rows = [row for row in reference().splitlines() if row.startswith("| `")]
    names = [*(metric.name for metric in METRICS), *(alert.name for alert in ALERTS)]
    assert [row.split("`")[1] for row in rows] == names
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)


def test_a_name_is_known_whatever_its_brackets_stand_for() -> None:
    known = ["reward/mean", "seconds/rollout", "eval/pass_at_16", "eval/source/openai/gsm8k/best_at_2"]
    unknown = [
        "reward/mea",
        "reward/mean/x",
        "seconds/",
        "eval/pass_at_",
        "xreward/mean",
        "eval/source/gsm8k",
        "reward_mean",
    ]
    assert [name for name in [*known, *unknown] if is_known(name)] == known
