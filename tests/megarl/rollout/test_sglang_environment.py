"""The environment that a server of SGLang's is started in."""

import os
import subprocess
import sys
from ipaddress import ip_address

import pytest

from megarl.rollout.sglang import installation
from megarl.rollout.sglang.environment import WITHHELD
from megarl.rollout.sglang.kind import SGLANG
from megarl.rollout.sglang.parent import PARENT_VARIABLE
from megarl.rollout.sglang.process import Server
from megatron_ext import device


@pytest.fixture
def environment(tmp_path, monkeypatch, folders):
    """Starts a program in the place of a server, with the arguments given; gives the environment that it had."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && env --null > "$3/environment"\n')
    python.chmod(0o755)
    monkeypatch.setenv(installation.PYTHON_VARIABLE, str(python))

    def started(**arguments):
        server = Server(folders[0], arguments)
        try:
            assert server.wait() == 0
            printed = (server._folder / "environment").read_text()
        finally:
            server.close()
        return dict(line.split("=", 1) for line in printed.split("\0") if line)

    return started


@pytest.mark.parametrize("name", [*WITHHELD, "SGL_RETURN_ORIGINAL_LOGPROB", "SGL_FORCE_FP8_MARLIN"])
def test_what_would_change_samples_in_silence_is_withheld(environment, monkeypatch, name):
    """SGLang takes the value of a name with SGL_ for one with SGLANG_."""
    monkeypatch.setenv(name, "1")
    assert name not in environment()


def test_a_server_imports_nothing_from_the_folder_of_the_run(environment):
    assert environment()["PYTHONSAFEPATH"] == "1"


_MEETS = """
import megarl.rollout.sglang.server
import psutil
from torch import distributed
from megarl.process.ports import free_port

# As SGLang's workers do.
distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", world_size=1, rank=0)
listening = (each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN)
print(*(each.laddr.ip for each in listening))
"""


def test_workers_of_a_server_meet_on_loopback_alone(tmp_path):
    # Another version than those that have hooks needs nothing of SGLang to be imported.
    about = tmp_path / "sglang-0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        PARENT_VARIABLE: str(os.getpid()),
        "GLOO_SOCKET_IFNAME": "lo",
        "SGLANG_USE_CPU_ENGINE": "0",
    }
    ran = subprocess.run([sys.executable, "-c", _MEETS], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    addresses = ran.stdout.split()
    assert addresses
    assert all(ip_address(address).is_loopback for address in addresses)


def test_all_else_of_a_run_reaches_its_servers(environment, monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_STREAM_INTERVAL", "2")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    monkeypatch.setenv("SGL_LOG_GC", "1")
    found = environment()
    names = ("SGLANG_FORCE_STREAM_INTERVAL", "SGLANG_LOG_MS", "SGL_LOG_GC", "HF_HUB_OFFLINE")
    assert [found[name] for name in names] == ["2", "1", "1", "1"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("expandable_segments:True", ""),
        ("expandable_segments:True,max_split_size_mb:512", "max_split_size_mb:512"),
        ("roundup_power2_divisions:[256:1,>:2], expandable_segments : True", "roundup_power2_divisions:[256:1,>:2]"),
        ("max_split_size_mb:512,expandable_segments:True,backend:native", "max_split_size_mb:512,backend:native"),
    ],
)
def test_a_server_that_sleeps_has_no_expandable_segments(environment, monkeypatch, name, given, left):
    monkeypatch.setenv(name, given)
    assert environment()[name] == given
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    assert environment()[name] == given
    assert environment(**SGLANG.able_to_sleep)[name] == left


def test_a_server_finds_the_programs_of_its_own_environment_first(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert environment()["PATH"] == f"{tmp_path}:/usr/bin:/bin"
