"""Whether a metric is in the table of all metrics, by its own name or one that <angle brackets> stand for."""

import re

from megarl.tracking.metrics import METRICS


def is_known(name: str) -> bool:
    return any(re.fullmatch(_pattern(metric.name), name) for metric in METRICS)


def _pattern(name: str) -> str:
    return ".+".join(map(re.escape, re.split(r"<\w+>", name)))
