"""Write docs/metrics.md from the table: `python -m megarl.tracking.reference docs/metrics.md`."""

import sys
from pathlib import Path

from megarl.tracking.metrics import METRICS

_HEADER = """# Metrics

Made from `megarl/tracking/metrics.py` by `python -m megarl.tracking.reference docs/metrics.md`; change it there.

Every step logs its metrics once, to all loggers of `tracking.loggers`: `console`, `jsonl` and `tensorboard` are always
there, `wandb` and `mlflow` where they are installed. `metrics.jsonl` in `output_dir` has one JSON object per step; a
value that is not finite is `null` there. Step 0 is the evaluation before the first step.

Means over tokens are over the response tokens of the step's global batch. With `algorithm.updates_per_step` above 1,
metrics of the update are means over the optimizer steps, those that end in `max` the largest of them.
"""
_TABLE = ["| metric | unit | meaning |", "|---|---|---|"]


def reference() -> str:
    """The whole page, in Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit} | {_cell(metric.meaning)} |" for metric in METRICS]
    return "\n".join([_HEADER, *_TABLE, *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
