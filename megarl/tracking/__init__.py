"""Loggers of metrics, and the final report of a run."""

from megarl.tracking.histogram import Histogram, MetricValue
from megarl.tracking.jsonl import read_history
from megarl.tracking.registry import LOGGERS, check_loggers, open_tracker
from megarl.tracking.tracker import Logger, Run, Tracker

__all__ = [
    "LOGGERS",
    "Histogram",
    "Logger",
    "MetricValue",
    "Run",
    "Tracker",
    "check_loggers",
    "open_tracker",
    "read_history",
]
