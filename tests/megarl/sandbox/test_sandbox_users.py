import os
import pwd

import pytest
from sandbox_limits import LIMITS

from megarl.sandbox import users
from megarl.sandbox.run import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs run as another user")


def test_programs_run_as_a_user_that_no_directory_gives_to_anyone():
    finished = run("import os\nprint(os.getuid(), os.getgid())", b"", LIMITS, "namespaces")
    user, group = map(int, finished.output.split())
    assert 0x70000000 <= user == group < 0x80000000


def test_a_user_that_somebody_has_is_passed_over(monkeypatch):
    first = users.another_user()
    somebody = pwd.getpwuid(0)
    real = pwd.getpwuid
    monkeypatch.setattr(pwd, "getpwuid", lambda user: somebody if user == first else real(user))
    assert users.another_user() not in (0, first)


def test_a_container_that_maps_few_users_gets_one_of_them(monkeypatch):
    monkeypatch.setattr(users, "_mapped", lambda name: [range(65_536)])
    assert 10_000 <= users.another_user() < 60_000
    monkeypatch.setattr(users, "_mapped", lambda name: [range(1)])
    with pytest.raises(OSError, match="has no number that nobody has"):
        users.another_user()
