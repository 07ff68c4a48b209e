"""A Ray cluster for one run: on loopback on this machine, or an existing one."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import ray
from ray import _raylet
from ray._private import ray_constants

from converters.durable import is_disk_full
from converters.errors import UserError
from megarl.cluster.ray.joining import join, wait_for_machines
from megarl.cluster.ray.object_store import store_bytes_here
from megarl.cluster.ray.ray_driver import undisturbed, without_monitors
from megarl.process.errors import RunFailed
from megarl.process.phase import phase
from megarl.process.scratch import scratch_folder
from megarl.process.signals import held
from megarl.schema import ClusterConfig
from megatron_ext.loopback import LOOPBACK

_RAY = "r"
LONGEST_SOCKET = f"{_RAY}/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store"
"""The longest path of a socket in a Ray node's folder, whose name has the time and process ID of the start."""
_TIMED_OUT = ("timed out during startup", "Timed out waiting for file")
_NEEDED_BYTES = 2**18
"""Fewer than Ray writes while it starts."""


class RayNotStarted(RunFailed):
    """Ray timed out waiting for its own processes."""

    sentence = (
        "Ray's processes were not up after its 30 seconds: this machine is too busy, or short of memory; free it, and "
        "start the run again"
    )
    happened = "Ray's processes were not up after its 30 seconds"
    details = ""


@contextmanager
def ray_cluster(config: ClusterConfig) -> Iterator[None]:
    """Connect to the cluster at `config.address` once its machines are there, or start one that ends with the context.

    Raises UserError if there is no room for the configured object store, or on the disk for temporary files.

    Within another such context nothing is started: the runs share the cluster.
    """
    if ray.is_initialized():
        yield
        return
    if config.address is not None:
        with phase("connecting to Ray"):
            join(config.address)
        try:
            wait_for_machines(config)
            yield
        finally:
            with held():
                ray.shutdown()
        return
    object_store_bytes = store_bytes_here(config.object_store_bytes)
    with scratch_folder(LONGEST_SOCKET) as folder:
        try:
            with phase("starting Ray"):
                # A subfolder, because Ray makes the folder that it is given accessible to all users.
                _start_local(folder / _RAY, object_store_bytes)
            yield
        finally:
            with held():
                ray.shutdown()


def _start_local(folder: Path, object_store_bytes: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The workers are the job: by default Ray gives everything else on the machine priority over them.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling
    # Do not kill them when others fill the machine's memory; if they do it themselves, the kernel kills the largest.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    # Do not prestart workers: they would not have the actors' environment, and are never used.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    _require_token()
    _bind_to_loopback()
    try:
        with undisturbed(), without_monitors():
            ray.init(
                # Ignore RAY_ADDRESS, which is set in every KubeRay container.
                address="local",
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
                num_cpus=1,
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
    except Exception as error:
        _check_room(folder)
        # Ray (2.60) raises a bare Exception or RuntimeError, after timeouts that cannot be configured.
        if not any(words in str(error) for words in _TIMED_OUT):
            raise
        raise RayNotStarted from error


def _check_room(folder: Path) -> None:
    """Raise UserError if the disk of a folder is full, which Ray waits for in vain and does not report."""
    try:
        with TemporaryFile(dir=folder.parent) as file:
            file.write(bytes(_NEEDED_BYTES))
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"{folder.parent.parent} has no room for Ray's sockets and logs ({error.strerror}): make room there, or"
                " set TMPDIR to a folder on another disk"
            ) from error


def _require_token() -> None:
    """Give the cluster a secret of this process, since other users of the machine can reach loopback, too.

    By default Ray (2.60) keeps one secret in the user's home for all clusters, and prints that on every start.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    # One for all clusters of this process, as Ray reads it only once.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    _raylet.Config.initialize("")  # type: ignore[attr-defined]  # reads the environment again


def _bind_to_loopback() -> None:
    """Make Ray (2.60) use loopback as this node's address, so that its servers listen nowhere else.

    Ray replaces a given loopback address by an external one, except on platforms where it never forms clusters.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
