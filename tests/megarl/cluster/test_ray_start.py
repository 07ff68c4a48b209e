"""A cluster of our own that does not come up, and one below a long TMPDIR."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from file_sizes import files_up_to
from ray import _raylet
from ray._private import node

from converters.errors import UserError
from megarl.cluster.ray.runtime import _TIMED_OUT, LONGEST_SOCKET, RayNotStarted, ray_cluster
from megarl.schema import ClusterConfig

OF_RAYS_HEAD = "Timed out waiting for file /tmp/megarl-1-x/r/session_2026-01-31/gcs_server_port_75726b"
OF_RAY = "The current node timed out during startup. This could happen because the raylet failed to startup"


@pytest.mark.parametrize(
    ("says", "raised"), [(OF_RAY, RayNotStarted), (OF_RAYS_HEAD, RayNotStarted), ("port 7 is taken", Exception)]
)
def test_only_its_time_out_is_said_in_a_sentence(monkeypatch, says, raised):
    def never_up(**_):
        raise Exception(says)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", never_up)
    with pytest.raises(raised, match="") as found, ray_cluster(ClusterConfig()):
        pass
    assert type(found.value) is raised


def test_the_words_are_those_of_ray():
    said = Path(node.__file__).read_bytes(), Path(_raylet.__file__).read_bytes()
    assert [words.encode() in text for words, text in zip(_TIMED_OUT, said, strict=True)] == [True, True]


def test_a_full_disk_of_the_temporary_folder_is_said(monkeypatch):
    def never_up(**_):
        raise Exception(OF_RAY)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", never_up)
    said = r"has no room for Ray's sockets and logs \(.*\): make room there, or set TMPDIR to"
    with files_up_to(2**12), pytest.raises(UserError, match=said), ray_cluster(ClusterConfig()):
        pass


_START = """
from megarl.cluster.ray.runtime import ray_cluster
from megarl.schema import ClusterConfig
from ray._private import worker
with ray_cluster(ClusterConfig()):
    print(worker._global_node.plasma_store_socket_name)
"""


def test_ray_starts_below_a_long_tmpdir_too(tmp_path):
    long = tmp_path / "a-long-name-of-a-job-and-its-user"
    long.mkdir()
    environment = {**os.environ, "TMPDIR": str(long)}
    started = subprocess.run([sys.executable, "-c", _START], env=environment, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    path = Path(started.stdout.strip())
    folder = path.parents[3]
    assert folder.name.startswith("megarl-")
    assert not folder.exists()
    assert len(str(path.relative_to(folder))) <= len(LONGEST_SOCKET)
    assert path.name == Path(LONGEST_SOCKET).name


@pytest.mark.parametrize("address", ["192.0.2.1:6379", pytest.param("http://192.0.2.1:8265", marks=pytest.mark.long)])
def test_a_run_without_an_address_has_a_cluster_of_its_own_whatever_ray_address_says(address):
    environment = {**os.environ, "RAY_ADDRESS": address}
    started = subprocess.run([sys.executable, "-c", _START], env=environment, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert "/megarl-" in started.stdout


_WORKER = """
import colorsys, os, sys
import megarl
import ray
from megarl.cluster.ray.runtime import ray_cluster
from megarl.schema import ClusterConfig

def imported():
    import colorsys, megarl
    return os.getcwd(), colorsys.__file__, megarl.__file__

with ray_cluster(ClusterConfig()):
    print(*ray.get(ray.remote(num_cpus=0)(imported).remote()), sep="\\n")
print(colorsys.__file__, megarl.__file__, sep="\\n")
"""


def test_processes_of_a_run_import_what_the_program_does_whatever_is_in_the_folder(tmp_path):
    folder = tmp_path / "of_others"
    (folder / "megarl").mkdir(parents=True)
    for file in ("megarl/__init__.py", "colorsys.py"):
        (folder / file).touch()
    # As the program `megarl`, whose path does not begin with the folder.
    command = [sys.executable, "-P", "-c", _WORKER]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    where, *in_worker = ran.stdout.splitlines()[-5:]
    assert where == str(folder)
    assert in_worker[:2] == in_worker[2:]


_INSTALLED = """
import site, sys
from pathlib import Path
import megarl
import ray
from megarl.cluster.ray.runtime import ray_cluster
from megarl.schema import ClusterConfig

folder = str(Path(megarl.__file__).parents[1])
if sys.argv[1:]:
    site.getsitepackages = lambda: [folder]
with ray_cluster(ClusterConfig()):
    first = ray.get(ray.remote(num_cpus=0)(lambda: __import__("sys").path[0]).remote())
print(first == folder)
"""


@pytest.mark.long
@pytest.mark.parametrize("installed", [False, True], ids=["in a checkout", "among packages"])
def test_the_packages_of_python_come_before_nothing_that_they_are_behind(installed):
    command = [sys.executable, "-P", "-c", _INSTALLED, *["installed"] * installed]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == str(not installed)
