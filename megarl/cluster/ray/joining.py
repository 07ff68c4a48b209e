"""Joins an existing Ray cluster, and waits for its machines."""

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from converters.errors import UserError
from megarl.cluster.ray.ray_driver import undisturbed
from megarl.cluster.ray.ray_head import is_head
from megarl.process.errors import MachinesUnfit
from megarl.process.phase import phase
from megarl.schema import ClusterConfig

AUTO = "auto"
_CONNECT_S = 5.0
_POLL_S = 0.5


def join(address: str) -> None:
    """Connect this process to the Ray cluster at "host:port", or with "auto" to that of this machine's Ray node.

    Raises UserError if nothing or something else listens there, or if the cluster accepts no connection from here.
    """
    if address != AUTO:
        _check_listener(address)
    try:
        with undisturbed():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, AuthenticationError) as error:
        raise MachinesUnfit(_refused(address)) from error


def wait_for_machines(config: ClusterConfig) -> None:
    """Wait until the cluster has `config.nodes` machines, if that is set.

    Raises UserError, naming the machines that have joined, after `config.start_timeout_s`.
    """
    if config.nodes is None or len(there := _addresses()) >= config.nodes:
        return
    deadline = time.monotonic() + config.start_timeout_s
    with phase(f"waiting for {config.nodes} machines, of which there are {len(there)}"):
        while len(there := _addresses()) < config.nodes:
            if time.monotonic() > deadline:
                raise MachinesUnfit(
                    f"after {config.start_timeout_s:g} s the Ray cluster has {len(there)} of cluster.nodes="
                    f"{config.nodes} machines, {', '.join(there)}: start Ray on the others (ray start --address=...),"
                    " lower cluster.nodes, or raise cluster.start_timeout_s"
                )
            time.sleep(_POLL_S)


def listens(host: str, port: int, timeout_s: float = _CONNECT_S) -> bool:
    """Whether something accepts connections at an address."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _check_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UserError(f"cluster.address={address} is no address: give host:port, or {AUTO} on a node of the cluster")
    # Otherwise Ray (2.60) retries for eighty seconds, prints, and exits the process.
    if not listens(host, int(port)):
        raise MachinesUnfit(
            f"nothing listens at cluster.address={address}: see that `ray start --head` runs there, and that its port"
            " can be reached from here"
        )
    if not is_head(address):
        raise MachinesUnfit(
            f"what listens at cluster.address={address} is no Ray head: give the port of `ray start --head`"
        )


def _refused(address: str) -> str:
    if address == AUTO:
        return f"cluster.address={AUTO} finds no Ray node on this machine: run `ray start` here, or give host:port"
    return (
        f"the Ray cluster at {address} takes no connection from here: set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as they"
        " were for its `ray start`"
    )


def machines(ray_nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes of `ray.nodes()` that are up and have CPUs, by address; nothing is placed on the others.

    The head of a cluster often has no CPUs, and neither has a Kubernetes pod that only runs the controller.
    """
    up = (node for node in ray_nodes if node["Alive"] and node["Resources"].get("CPU", 0))
    return sorted(up, key=lambda node: node["NodeManagerAddress"])


def _addresses() -> list[str]:
    return [node["NodeManagerAddress"] for node in machines(ray.nodes())]
