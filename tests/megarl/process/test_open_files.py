"""Every command begins with as many open files as the machine allows, within reason."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from megarl.cli.main import main
main(["inspect", "nowhere"])
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def limits_after(soft: int, hard: int) -> tuple[int, ...]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)], check=True, capture_output=True, text=True
    )
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize(("soft", "hard"), [(100, 900), (900, 900)])
def test_the_limit_is_raised_as_far_as_it_goes(soft, hard):
    assert limits_after(soft, hard) == (900, 900)


@pytest.mark.skipif(0 <= HARD < 2**17, reason="raising the hard limit needs more rights")
def test_the_limit_is_not_raised_beyond_what_helps():
    assert limits_after(100, 2**17) == (2**16, 2**17)
    assert limits_after(2**17, 2**17) == (2**17, 2**17)
