"""Limits of a process, and whom they bind."""

import resource

import pytest

from megarl.doctor import limits
from megarl.doctor.limits import Limits, limits_here

LIMIT = 64 * 1024
HOST = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("capabilities", "users", "may_lock"),
    [
        ("0000000000000000", HOST, False),
        ("0000000000003fff", HOST, False),
        ("0000000000004000", HOST, True),
        # The root of a container whose users are not the host's.
        ("000001ffffffffff", "         0       1000          1\n", False),
    ],
)
def test_only_who_has_the_capability_on_the_host_may_lock_all_memory(tmp_path, capabilities, users, may_lock):
    (tmp_path / "status").write_text(f"Name:\tpython\nCapInh:\tffffffffffffffff\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(users)
    assert limits._may_lock(tmp_path) == may_lock


@pytest.mark.parametrize(("may_lock", "locked"), [(False, LIMIT), (True, None)])
def test_the_limit_of_locked_memory_binds_who_may_not_lock_all(monkeypatch, may_lock, locked):
    soft = {resource.RLIMIT_MEMLOCK: LIMIT, resource.RLIMIT_NOFILE: 300}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(limits, "_may_lock", lambda _process: may_lock)
    assert limits_here() == Limits(locked, 300)


def test_no_limit_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits_here() == Limits(None, None)
    assert Limits().locked_memory == "no limit"
    assert Limits(LIMIT).locked_memory == "0.0625 MiB"
