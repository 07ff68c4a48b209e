"""Loggers to TensorBoard, Weights & Biases and MLflow; their packages are imported only when used."""

import importlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.process.errors import MayPass
from megarl.tracking.histogram import Histogram, MetricValue
from megarl.tracking.tracker import Logger, Run, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_WANDB_OFFLINE = ("offline", "dryrun", "disabled")
"""wandb modes that contact no server."""
_WANDB_BINS = 512
"""wandb's maximum number of bins in a histogram; it raises ValueError for more."""
_MLFLOW_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_MOST_WAITING = 100
"""Maximum number of steps queued for a service."""
_START_WAIT_S = 300.0
"""Longer than usual WANDB_INIT_TIMEOUTs; MLflow waits 20 minutes for a server that accepts but never answers."""
_CLOSE_WAIT_S = 60.0
_ADVICE = {"wandb": "set WANDB_MODE=offline", "mlflow": "see to MLFLOW_TRACKING_URI"}
"""Advice if a run cannot reach the service."""
_MLFLOW_FORBIDS = re.compile(r"[^\w.\- /]")
_SECRET = re.compile(
    r"(?:^|[_-])(?:token|secret|password|passwd|credentials?|(?:api|access|secret|private|auth)[_-]?key)$",
    re.IGNORECASE,
)
"""Names of variables and options to hide, as everyone with access to the logged run could read them."""


class TensorBoardLogger:
    """Event files in `output_dir`/tensorboard; a resumed run hides what was logged from its first step on."""

    FOLDER = "tensorboard"

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # torch takes seconds to import

        self._make_writer = partial(
            SummaryWriter, str(run.place(self.FOLDER)), purge_step=run.first_step if run.resumed else None
        )
        # Created at the first metric: a start that fails earlier must not leave an event file, which the next would
        # keep.
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Write one scalar or histogram per metric and flush."""
        self._writer = self._writer or self._make_writer()
        for name, value in metrics.items():
            if isinstance(value, Histogram):
                self._log_histogram(self._writer, step, name, value)
            else:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _log_histogram(self, writer: "SummaryWriter", step: int, name: str, histogram: Histogram) -> None:
        weighted = list(zip(histogram.middles, histogram.counts, strict=True))
        writer.add_histogram_raw(
            name,
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=histogram.total,
            sum=sum(middle * count for middle, count in weighted),
            sum_squares=sum(middle**2 * count for middle, count in weighted),
            bucket_limits=list(histogram.edges[1:]),
            bucket_counts=list(histogram.counts),
            global_step=step,
        )

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        """Close the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """A Weights & Biases run; a resumed run continues the run named in `output_dir`/wandb_run_id.

    It includes the configuration, except values whose names suggest secrets.

    Offline, each start is a separate run of one group: if two with the same id are synced, the later one replaces the
    earlier one, and the service cannot resume a run that it has not seen.

    "step" is a separate metric and the axis of all others, because wandb ignores decreasing step numbers, which occur
    after a resume. Raises `UserError` if wandb is not installed.
    """

    ID_FILE = "wandb_run_id"

    def __init__(self, run: Run) -> None:
        self._wandb: Any = _import("wandb")
        id_file = run.place(self.ID_FILE)
        settings: Any = self._wandb.setup().settings
        is_offline = settings.mode in _WANDB_OFFLINE
        run_id = None if is_offline else _read_id(id_file)
        self._run: Any = self._wandb.init(
            project=run.project,
            name=run.run_name,
            group=settings.run_group or (run.run_name if is_offline else None),
            dir=str(run.output_dir),
            config=_without_secrets(run.config),
            id=run_id,
            resume="must" if run_id else None,
        )
        if not is_offline:
            id_file.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log all metrics at once, histograms as wandb's own; neighbouring bins are joined if there are too many."""
        values = {name: self._of_wandb(value) for name, value in metrics.items()}
        self._run.log({**values, "step": step})

    def _of_wandb(self, value: MetricValue) -> Any:
        if not isinstance(value, Histogram):
            return value
        shown = value.with_at_most(_WANDB_BINS)
        return self._wandb.Histogram(np_histogram=(list(shown.counts), list(shown.edges)))

    def close(self, *, failed: bool = False) -> None:
        """Finish the run; its state is "failed" if the exit code is not 0."""
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """An MLflow run in the experiment `project`, on the server that MLflow's own settings name.

    A resumed run continues the run named in `output_dir`/mlflow_run_id. MLflow has no histograms, so their quantiles
    are logged as <name>/p10, p50 and p90. Characters that MLflow forbids in names become "_". Raises `UserError` if
    mlflow is not installed.
    """

    ID_FILE = "mlflow_run_id"

    def __init__(self, run: Run) -> None:
        self._mlflow: Any = _import("mlflow")
        id_file = run.place(self.ID_FILE)
        self._mlflow.set_experiment(run.project)
        started = self._mlflow.start_run(run_id=_read_id(id_file), run_name=run.run_name)
        id_file.write_text(started.info.run_id)

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Log all metrics at once."""
        self._mlflow.log_metrics(_of_mlflow(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        """End the run."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class ServiceLogger:
    """A logger to a service that may fail: failures are printed and the metrics lost there, but the run goes on.

    The logger is created and used in its own thread, so that steps do not wait for the service. Raises what `make`
    raises, and TimeoutError if that takes longer than `_START_WAIT_S`.
    """

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        self._name = name
        self._waiting: Queue[tuple[int, Mapping[str, MetricValue]] | None] = Queue(_MOST_WAITING)
        self._has_lost = self._has_failed = False
        made: Future[None] = Future()
        # A daemon, so that a service that never answers does not keep the program from exiting.
        self._thread = Thread(target=self._serve, args=(make, made), name=name, daemon=True)
        self._thread.start()
        if not wait([made], _START_WAIT_S).done:
            raise TimeoutError(f"no answer in {_START_WAIT_S:.0f} s")
        made.result()

    def log(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Queue the metrics of one step for the service; if the queue is full, they are lost."""
        try:
            self._waiting.put_nowait((step, metrics))
        except Full:
            if not self._has_lost:
                self._warn(f"is {_MOST_WAITING} steps behind: metrics from step {step} on may be missing there")
            self._has_lost = True

    def close(self, *, failed: bool = False) -> None:
        """Let it write pending metrics and close, waiting at most `_CLOSE_WAIT_S`."""
        self._has_failed = failed
        end = time.monotonic() + _CLOSE_WAIT_S
        with suppress(Full):
            self._waiting.put(None, timeout=_CLOSE_WAIT_S)
            self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._warn(f"has not taken all metrics {_CLOSE_WAIT_S:.0f} s after the run: the last may be missing there")

    def _serve(self, make: Callable[[], Logger], made: "Future[None]") -> None:
        try:
            logger = make()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            made.set_exception(error)
            return
        made.set_result(None)
        while (taken := self._waiting.get()) is not None:
            step, metrics = taken
            self._try(f"does not take the metrics of step {step}", partial(logger.log, step, metrics))
        self._try("does not take the end of the run", lambda: logger.close(failed=self._has_failed))

    def _try(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - each service has its own
            self._warn(f"{what} ({_told(error)})")

    def _warn(self, what: str) -> None:
        print(f"warning: {self._name} {what}; the run goes on", file=sys.stderr, flush=True)


def open_service(name: str, make: Callable[[Run], Logger], run: Run) -> Logger:
    """Open a service's logger as a `ServiceLogger`; a resumed run that cannot reach it warns, and goes on without.

    On a run's first start it raises MayPass instead, so that wrong settings are noticed.
    """
    try:
        return ServiceLogger(name, partial(make, run))
    except UserError:
        raise
    except Exception as error:
        if not run.resumed:
            raise MayPass(
                f"{name} does not take the run ({_told(error)}): {_ADVICE[name]}, or take it off tracking.loggers"
            ) from error
        print(
            f"warning: {name} cannot be reached ({_told(error)}); the run goes on without it",
            file=sys.stderr,
            flush=True,
        )
        return Tracker([])


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _without_secrets(config: Any) -> Any:
    """The same, with values hidden whose names suggest secrets, such as HF_TOKEN in `cluster.environment`."""
    if isinstance(config, Mapping):
        return {
            name: "hidden"
            if isinstance(value, str) and value and _SECRET.search(str(name))
            else _without_secrets(value)
            for name, value in config.items()
        }
    return [_without_secrets(each) for each in config] if isinstance(config, list | tuple) else config


def _of_mlflow(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in metrics.items():
        allowed = _MLFLOW_FORBIDS.sub("_", name)
        if not isinstance(value, Histogram):
            values[allowed] = value
        elif value.total:
            values |= {f"{allowed}/{end}": value.quantile(share) for end, share in _MLFLOW_QUANTILES.items()}
    return values


def install_command(name: str, stack: str) -> str:
    """The command that installs a logger's package alongside the versions of a stack, "cpu" or "cuda"."""
    stated = (text.partition(";") for text in requires("megarl") or [])
    wanted = next(package.strip() for package, _, marker in stated if marker.strip() == f'extra == "{name}"')
    return f"pip install --constraint constraints/{stack}.txt '{wanted}'"


def check_installed(name: str) -> None:
    """Raise UserError if the package of this name, which is also the logger's name, is not installed."""
    if find_spec(name) is None:
        how = install_command(name, "cpu" if version("torch").endswith("+cpu") else "cuda")
        raise UserError(
            f"tracking.loggers names {name!r}, which is not installed; install it with {how}, or take it off the list"
        )


def _import(name: str) -> ModuleType:
    check_installed(name)
    return importlib.import_module(name)


def _read_id(file: Path) -> str | None:
    return file.read_text() if file.exists() else None
