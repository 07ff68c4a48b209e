"""Whether a Ray head is at an address: `ray.init` waits for the answer of any program that listens there, for ever.

It is asked in a process of its own, which can be ended while it waits, and whose complaints nobody reads.
"""

import subprocess
import sys

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

_NO_HEAD = 3
_ANSWER_S = 30.0


def is_head(address: str) -> bool:
    """Whether a Ray head answers at "host:port", be it that it takes no connection from here."""
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
