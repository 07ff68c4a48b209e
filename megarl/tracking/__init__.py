"""Where metrics go. The report at the end of a run is in `megarl.tracking.report`."""

from collections.abc import Callable, Mapping

from megarl.tracking.console import make_console_logger
from megarl.tracking.jsonl import JsonLinesLogger, read_history
from megarl.tracking.services import MlflowLogger, TensorBoardLogger, WandbLogger
from megarl.tracking.tracker import Logger, Run, Tracker, open_tracker

LOGGERS: Mapping[str, Callable[[Run], Logger]] = {
    "console": make_console_logger,
    "jsonl": JsonLinesLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
"""Makers of the loggers by the names in `tracking.loggers`."""

__all__ = ["LOGGERS", "Logger", "Run", "Tracker", "open_tracker", "read_history"]
