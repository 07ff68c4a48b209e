"""Loggers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from converters.errors import UserError, did_you_mean
from megarl.tracking.console import make_console_logger
from megarl.tracking.jsonl import FILE_NAME, JsonLinesLogger
from megarl.tracking.services import MlflowLogger, TensorBoardLogger, WandbLogger, check_installed, open_service
from megarl.tracking.tracker import Logger, Run, Tracker


@dataclass(frozen=True)
class LoggerKind:
    """A logger: how it is made, and what the rest of megarl needs to know about it."""

    make: Callable[[Run], Logger]
    folders: tuple[str, ...] = ()
    """Folders that it creates in `output_dir`."""
    files: tuple[str, ...] = ()
    """Files that it creates there."""
    package: str | None = None
    """A package that it needs and megarl does not require."""


LOGGERS: Mapping[str, LoggerKind] = {
    "console": LoggerKind(make_console_logger),
    "jsonl": LoggerKind(JsonLinesLogger, files=(FILE_NAME,)),
    "tensorboard": LoggerKind(TensorBoardLogger, folders=(TensorBoardLogger.FOLDER,)),
    "wandb": LoggerKind(
        partial(open_service, "wandb", WandbLogger),
        folders=("wandb",),
        files=(WandbLogger.ID_FILE,),
        package="wandb",
    ),
    "mlflow": LoggerKind(
        partial(open_service, "mlflow", MlflowLogger), files=(MlflowLogger.ID_FILE,), package="mlflow-skinny"
    ),
}
"""The valid names of `tracking.loggers`."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if the package of one of these loggers is not installed."""
    for name in names:
        if LOGGERS[name].package:
            check_installed(name)


def open_tracker(names: Sequence[str], run: Run) -> Tracker:
    """Make the loggers `names` of `LOGGERS` for `run`.

    Raises `UserError` for an unknown name. An error while a logger starts is raised after closing the others.
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
            loggers.append(LOGGERS[name].make(run))
    except BaseException:
        Tracker(loggers).close(failed=True)
        raise
    return Tracker(loggers)
