"""Keeps Ray (2.60) from changing the process that starts it and from starting what no run needs: see each function."""

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
    """Around `ray.init`."""
    _say_nothing_of_its_own()
    with _keep_signal_handlers(), _with_this_package():
        yield


@contextmanager
def without_monitors() -> Iterator[None]:
    """Around a `ray.init` that starts a cluster: no autoscaler for one machine, no process that follows log files.

    The actors write their own logs. The two took a quarter of the CPU seconds of a start, and `ray.init` does not ask.
    """
    replaced = parameter.RayParams
    parameter.RayParams = partial(replaced, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = replaced


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Leave SIGTERM as it is.

    Ray replaces its handler twice: by one that exits with code 15, then by a native one that writes addresses to
    standard error and aborts the process. For faults Python's faulthandler, which Ray turns on, says more.
    """
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True  # the environment was read on import
    replaced = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = replaced


@contextmanager
def _with_this_package() -> Iterator[None]:
    """Let the workers of the run import the package from where this process has it.

    Ray puts the current folder of whoever connects before all else on their paths: a checkout, which may be another
    version than the program's, or a folder in which others leave a `json.py`. In its last step alone: the processes
    that it starts before, and all workers with them, stay in the folder of the run.
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
    """The folder that the package is imported from; None if it is the one of Python's packages.

    Workers have that folder anyhow, behind PYTHONPATH as the program has it, and would have it before.
    """
    folder = Path(megarl.__file__).parents[1]
    return None if str(folder) in {*site.getsitepackages(), site.getusersitepackages()} else folder


def _say_nothing_of_its_own() -> None:
    """Start no thread that prints on the console what Ray's processes report, also with `log_to_driver` off.

    It is the end of the raylet's log, mostly, where the raylet is gone; what became of the run says WorkerGroup.
    """
    worker.listen_error_messages = lambda *_: None
