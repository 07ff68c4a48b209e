"""Writes docs/metrics.md from the table of metrics: `python -m megarl.diagnostics.reference docs/metrics.md`."""

import sys
from pathlib import Path

from megarl.diagnostics.alerts import ALERTS, Alert
from megarl.tracking.metrics import METRICS

_HEADER = """# Metrics

Made from `megarl/tracking/metrics.py` and `megarl/diagnostics/alerts.py` by `make docs`; change them.

Every step logs its metrics once, to all loggers of `tracking.loggers`: by default `console`, `jsonl` and `tensorboard`;
`wandb` and `mlflow` where they are installed and named. `metrics.jsonl` in `output_dir` has one JSON object per step; a
value that is not finite is `null` there. Step 0 is the evaluation before the first step.

Means over tokens are over the response tokens of the step's global batch. With `algorithm.updates_per_step` above 1,
metrics of the update are means over the optimizer steps, those that end in `max` the largest of them.

A metric may be a histogram. In `metrics.jsonl` it is `{"edges": [...], "counts": [...]}`: `counts[i]` values lie from
`edges[i]` to `edges[i + 1]`, and what lies beyond the ends is counted in the outer bins; where
things are numbered, as experts are, it is `{"counts": [...]}`. TensorBoard and Weights & Biases draw it,
MLflow is given its quantiles as `<name>/p10`, `p50` and `p90`, and the console leaves it out.
"""
_TABLE = ["| metric | unit | meaning |", "|---|---|---|"]

_WARNINGS = """
## Warnings

A metric that stays bad for `tracking.warn_after_steps` steps is warned of, once, on the console; `warning/<alert>` is
1 from there on until it has been good for as many steps. The thresholds are keys of `tracking`, and `null` switches one
off. A resumed run reads in `metrics.jsonl` what it has warned of already. Only what can act in the run is advised:
`algorithm.policy_loss_options.clip_high` for instance where there are several updates to a rollout.

| alert | warned of where | what people look at and do |
|---|---|---|"""


def reference() -> str:
    """Return the whole page in Markdown."""
    rows = [f"| `{metric.name}` | {metric.unit} | {_cell(metric.meaning)} |" for metric in METRICS]
    return "\n".join([_HEADER, *_TABLE, *rows, _WARNINGS, *map(_warning_row, ALERTS)]) + "\n"


def _warning_row(alert: Alert) -> str:
    side = "below its first value times" if alert.falls else "above"
    advice = _cell(", ".join(each.text for each in alert.advice))
    return f"| `{alert.name}` | `{alert.metric}` is {side} `tracking.{alert.key}` | {advice} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
