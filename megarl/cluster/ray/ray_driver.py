"""Keeps Ray (2.60) from changing the process that starts it, and from starting what no run needs."""

import site
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray._private import parameter, ray_constants, utils, worker

import megarl


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context for `ray.init` that keeps it from changing this process."""
    _say_nothing_of_its_own()
    with _keep_signal_handlers(), _with_this_package():
        yield


@contextmanager
def without_monitors() -> Iterator[None]:
    """Context for a `ray.init` that starts a cluster: without autoscaler, and without the process that tails log files.

    Actors write their own logs. The two took a quarter of a start's CPU seconds, and `ray.init` has no option for them.
    """
    replaced = parameter.RayParams
    parameter.RayParams = partial(replaced, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = replaced


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Keep this process's handler of SIGTERM.

    Ray replaces it twice: by a handler that exits with code 15, then by a native one that writes addresses to stderr
    and aborts the process. For crashes, Python's faulthandler, which Ray enables, is more helpful.
    """
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True  # the environment variable is only read on import
    replaced = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = replaced


@contextmanager
def _with_this_package() -> Iterator[None]:
    """Make the run's workers import the package from the same place as this process.

    Ray puts the current folder of the connecting process first on the workers' paths. This may be a checkout of another
    version, or a folder in which others left a `json.py`. Only this last step is changed: the processes that Ray starts
    before, and all workers with them, stay in the run's folder.
    """
    replaced = worker.connect

    def connect(*arguments: Any, **options: Any) -> None:
        with TemporaryDirectory() as empty, chdir(_checkout() or empty):
            replaced(*arguments, **options)

    worker.connect = connect
    try:
        yield
    finally:
        worker.connect = replaced


def _checkout() -> Path | None:
    """The folder that the package is imported from; None if that is site-packages.

    Workers have site-packages anyway, after PYTHONPATH as in this process; adding it would put it before.
    """
    folder = Path(megarl.__file__).parents[1]
    return None if str(folder) in {*site.getsitepackages(), site.getusersitepackages()} else folder


def _say_nothing_of_its_own() -> None:
    """Do not start the thread that prints reports of Ray's processes, which runs even with `log_to_driver` off.

    It mostly prints the end of a dead raylet's log; WorkerGroup reports what happened to the run.
    """
    worker.listen_error_messages = lambda *_: None
