"""A node of a Slurm job without a Slurm: a Ray node of this machine, and who joins it from another checkout."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import megarl
from megarl.cluster.ray.joining import listens
from megarl.process.ports import free_port

FEW_FILES = 256
"""A soft limit such as that of a login shell, which Slurm passes on."""
MANY_FILES = 8192
_NODE = """
import resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
from megarl.cluster.ray.slurm import main
sys.exit(main(sys.argv[2:]))
"""
_JOINS = """
import sys
import ray
from megarl.cluster.ray.joining import join
join(sys.argv[1])

@ray.remote(num_cpus=1)
def where():
    import megarl
    return megarl.__file__

print(ray.get(where.remote()))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The task of a node, its address, and an environment that may join."""
    token = tmp_path_factory.mktemp("job") / "token"
    token.write_text(secrets.token_hex(32))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "SLURMD_NODENAME": "n1",
        "SLURM_CPUS_ON_NODE": "1",
    }
    address = f"127.0.0.1:{(port := free_port())}"
    words = [str(FEW_FILES), "node", address, "--head", "n1"]
    task = subprocess.Popen([sys.executable, "-c", _NODE, *words], env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while not listens("127.0.0.1", port, 1.0):
            assert task.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield psutil.Process(task.pid), address, environment
    finally:
        task.send_signal(signal.SIGUSR2)
        assert task.wait(240) == 0


def test_rays_own_processes_may_have_many_files_open(node):
    (server,) = [each for each in node[0].children(recursive=True) if each.name() == "gcs_server"]
    soft, hard = server.rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(hard, MANY_FILES) > FEW_FILES


@pytest.mark.long
def test_workers_have_the_package_of_who_joined_and_not_of_the_folder_it_is_in(node, tmp_path):
    _, address, environment = node
    (tmp_path / "checkout/megarl").mkdir(parents=True)
    (tmp_path / "checkout/megarl/__init__.py").write_text("raise RuntimeError('another version')")
    (tmp_path / "joins.py").write_text(_JOINS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "joins.py"), address],
        cwd=tmp_path / "checkout",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == Path(megarl.__file__)
