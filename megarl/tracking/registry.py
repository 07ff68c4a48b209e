"""Loggers by name."""

from collections.abc import Callable, Mapping, Sequence

from converters.errors import UserError, did_you_mean
from megarl.tracking.console import make_console_logger
from megarl.tracking.jsonl import JsonLinesLogger
from megarl.tracking.services import MlflowLogger, TensorBoardLogger, WandbLogger
from megarl.tracking.tracker import Logger, Run, Tracker

LOGGERS: Mapping[str, Callable[[Run], Logger]] = {
    "console": make_console_logger,
    "jsonl": JsonLinesLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
"""Makers of the loggers that `tracking.loggers` may name."""


def open_tracker(names: Sequence[str], run: Run) -> Tracker:
    """Make the loggers `names` of `LOGGERS` for `run`.

    Raises `UserError` for an unknown name, and what a logger raises that cannot start, after closing the others.
    """
    for name in names:
        if name not in LOGGERS:
            raise UserError(
                f"tracking.loggers has {name!r}{did_you_mean(name, LOGGERS)}; the loggers are {', '.join(LOGGERS)}"
            )
    run.output_dir.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = []
    try:
        for name in names:
            loggers.append(LOGGERS[name](run))
    except BaseException:
        Tracker(loggers).close()
        raise
    return Tracker(loggers)
