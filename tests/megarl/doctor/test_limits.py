"""Limits of a process, and whom they bind."""

import resource
import subprocess
import sys

import pytest

from megarl.doctor.limits import Limits, limits_here

LIMIT = 64 * 1024
HOST = "         0          0 4294967295\n"
SHOW = f"""
import resource
from megarl.doctor.limits import limits_here
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({LIMIT}, {LIMIT}))
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
import sys
from pathlib import Path
print(limits_here(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("capabilities", "users", "locked"),
    [
        ("0000000000000000", HOST, LIMIT),
        ("0000000000003fff", HOST, LIMIT),
        ("0000000000004000", HOST, None),
        # The root of a container whose users are not the host's.
        ("000001ffffffffff", "         0       1000          1\n", LIMIT),
    ],
)
def test_the_limit_of_locked_memory_binds_who_has_no_capability(tmp_path, capabilities, users, locked):
    (tmp_path / "status").write_text(f"Name:\tpython\nCapInh:\tffffffffffffffff\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(users)
    shown = subprocess.run([sys.executable, "-c", SHOW, str(tmp_path)], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == str(Limits(locked, 300))


def test_no_limit_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits_here() == Limits(None, None)
    assert Limits().locked_memory == "no limit"
    assert Limits(LIMIT).locked_memory == "0.0625 MiB"
