"""Limits the loopback device to a rate, like that of a network between machines or sites."""

import os
import shutil
import sys

_PROGRAMS = ("unshare", "ip", "tc")
_INSIDE = "MEGARL_BENCHMARK_LOOPBACK_GBIT"
# The token bucket must hold whole packets: those of loopback have up to 64 KiB.
_SCRIPT = """\
ip link set lo up && tc qdisc add dev lo root tbf rate {gbit:g}gbit burst 1mb latency 200ms && exec "$@"
"""


def hold_loopback(gbit: float) -> None:
    """Restart this program in a network namespace with loopback limited to `gbit` Gbit/s, unless it is in one.

    Exits if a program needed for this is missing.
    """
    if os.environ.get(_INSIDE) == str(gbit):
        return
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"--gbit needs {', '.join(missing)}: install util-linux and iproute2, or leave --gbit out")
    os.environ[_INSIDE] = str(gbit)
    shell = ("bash", "-c", _SCRIPT.format(gbit=gbit), "bash")
    os.execvp("unshare", ["unshare", "--map-root-user", "--net", *shell, sys.executable, *sys.argv])
