"""Tells whether an address is a Ray head's: `ray.init` waits forever for any program that listens there.

The check runs in a process of its own, which can be killed while it waits, and whose output is discarded.
"""

import subprocess
import sys

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

_NO_HEAD = 3
_ANSWER_S = 30.0


def is_head(address: str) -> bool:
    """Whether a Ray head answers at "host:port", even if it accepts no connection from here."""
    command = [sys.executable, "-P", "-m", "megarl.cluster.ray.ray_head", address]
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode != _NO_HEAD


def _ask(address: str) -> int:
    try:
        GcsClient(address=address)
    except AuthenticationError:
        return 0
    except RpcError:
        return _NO_HEAD
    return 0


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1]))
