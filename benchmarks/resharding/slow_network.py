"""A loopback device that is held to a rate, as a network between machines or sites would be."""

import os
import shutil
import sys

_PROGRAMS = ("unshare", "ip", "tc")
_INSIDE = "MEGARL_BENCHMARK_LOOPBACK_GBIT"
# A token bucket lets whole packets through: those of loopback have up to 64 KiB.
_SCRIPT = """\
ip link set lo up && tc qdisc add dev lo root tbf rate {gbit:g}gbit burst 1mb latency 200ms && exec "$@"
"""


def hold_loopback(gbit: float) -> None:
    """Restart this program in a network namespace whose loopback device lets `gbit` Gbit/s through, if it is not.

    Ends the program where others that it takes are missing.
    """
    if os.environ.get(_INSIDE) == str(gbit):
        return
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"--gbit needs {', '.join(missing)}: install util-linux and iproute2, or leave --gbit out")
    os.environ[_INSIDE] = str(gbit)
    shell = ("bash", "-c", _SCRIPT.format(gbit=gbit), "bash")
    os.execvp("unshare", ["unshare", "--map-root-user", "--net", *shell, sys.executable, *sys.argv])
