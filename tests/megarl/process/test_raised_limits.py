"""Every command begins with limits as high as the machine allows, within reason."""

import resource
import subprocess
import sys

import pytest

from megarl.process.raised_limits import raise_limits

PROGRAM = """
import resource, sys
kind, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(kind, (soft, hard))
from megarl.cli.main import main
main(["inspect", "nowhere"])
print(*resource.getrlimit(kind))
"""
FILES, LOCKED = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
HARD = resource.getrlimit(FILES)[1]
NO_LIMIT = resource.RLIM_INFINITY


def limits_after(kind: int, soft: int, hard: int) -> tuple[int, ...]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(kind), str(soft), str(hard)], check=True, capture_output=True, text=True
    )
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize(
    ("kind", "soft", "hard"), [(FILES, 100, 900), (FILES, 900, 900), (LOCKED, 2**12, 2**16), (LOCKED, 2**16, 2**16)]
)
def test_a_limit_is_raised_as_far_as_it_goes(kind, soft, hard):
    assert limits_after(kind, soft, hard) == (hard, hard)


@pytest.mark.skipif(0 <= HARD < 2**17, reason="raising the hard limit needs more rights")
def test_the_limit_of_files_is_not_raised_beyond_what_helps():
    assert limits_after(FILES, 100, 2**17) == (2**16, 2**17)
    assert limits_after(FILES, 2**17, 2**17) == (2**17, 2**17)


def test_without_a_hard_limit_all_memory_may_be_locked_and_enough_files_be_open(monkeypatch):
    limits = {FILES: (1024, NO_LIMIT), LOCKED: (2**16, NO_LIMIT)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    raise_limits()
    assert limits == {FILES: (2**16, NO_LIMIT), LOCKED: (NO_LIMIT, NO_LIMIT)}
    limits.update({FILES: (NO_LIMIT, NO_LIMIT)})
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("raised what has no limit"))
    raise_limits()
