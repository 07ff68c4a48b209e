"""Loggers to what others run or read: TensorBoard, Weights & Biases, MLflow. Each is imported when it is asked for."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from converters.errors import UserError
from megarl.tracking.tracker import Run


class TensorBoardLogger:
    """Event files in `output_dir`/tensorboard; a resumed run hides what was logged from its first step on."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # torch takes seconds to import

        folder = run.output_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step if run.resumed else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric and flush."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run; a resumed run goes on with the run that `output_dir`/wandb_run_id names.

    "step" is a metric of its own and the axis of all others, because wandb ignores a step number that falls, as it
    does after a resume. Raises `UserError` if wandb is not installed.
    """

    def __init__(self, run: Run) -> None:
        wandb = _import("wandb", extra="wandb")
        id_file = run.output_dir / "wandb_run_id"
        run_id = _read_id(id_file, run)
        self._run: Any = wandb.init(
            project=run.project,
            name=run.run_name,
            dir=str(run.output_dir),
            config=dict(run.config),
            id=run_id,
            resume="must" if run_id else None,
        )
        id_file.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics at once."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowLogger:
    """An MLflow run in the experiment `project`, at the server that MLflow's own settings name.

    A resumed run goes on with the run that `output_dir`/mlflow_run_id names. Raises `UserError` if mlflow is not
    installed.
    """

    def __init__(self, run: Run) -> None:
        self._mlflow: Any = _import("mlflow", extra="mlflow")
        id_file = run.output_dir / "mlflow_run_id"
        self._mlflow.set_experiment(run.project)
        started = self._mlflow.start_run(run_id=_read_id(id_file, run), run_name=run.run_name)
        id_file.write_text(started.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics at once."""
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _import(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"tracking.loggers names {name!r}, which is not installed; install it with pip install 'megarl[{extra}]' "
            f"or take it off the list"
        ) from error


def _read_id(file: Path, run: Run) -> str | None:
    return file.read_text() if run.resumed and file.exists() else None
