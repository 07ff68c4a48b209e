"""The way into a cluster, and what is in it: addresses that are none, and other programs that listen there."""

import http.server
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, suppress

import pytest
import ray

from converters.errors import UserError
from megarl.cluster.ray import ray_head
from megarl.cluster.ray.joining import join, machines
from megarl.cluster.ray.ray_head import is_head


def node(address, *, alive=True, **resources):
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_machines_that_can_hold_a_process_are_counted():
    controller, dead = node("10.0.0.1", memory=4.0), node("10.0.0.2", alive=False, CPU=96.0)
    first, second = node("10.0.0.3", CPU=96.0, GPU=8.0), node("10.0.0.4", CPU=96.0)
    assert machines([second, controller, dead, first]) == [first, second]


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "ray://head:10001"])
def test_what_is_no_address_is_said(address):
    with pytest.raises(UserError, match=f"^cluster.address={address} is no address: give host:port, or auto on "):
        join(address)


@contextmanager
def program(kind):
    """A program that listens: one that closes connections, one that says nothing, or one that speaks HTTP."""
    if kind == "http":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        return

    def close_all():
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=close_all if kind == "closes" else int)
        thread.start()
        yield listener.getsockname()[1]
        # It wakes who accepts.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", ["closes", "silent", "http"])
def test_another_program_at_the_address_is_said_soon(monkeypatch, kind):
    monkeypatch.setattr(ray_head, "_ANSWER_S", 4.0)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it would wait for ever"))
    with program(kind) as port, pytest.raises(UserError) as found:
        join(f"127.0.0.1:{port}")
    assert found.value.sentence == (
        f"what listens at cluster.address=127.0.0.1:{port} is no Ray head: give the port of `ray start --head`"
    )


JOIN = """
from megarl.cluster.ray import joining
from converters.errors import UserError
joining._check_listener = lambda _address: None
try:
    joining.join("127.0.0.1:6379")
except UserError as error:
    print(error.sentence)
"""


def test_a_secret_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    # In another process: Ray keeps the secret that it has read.
    done = subprocess.run([sys.executable, "-c", JOIN], capture_output=True, text=True)
    says = (
        "the Ray cluster at 127.0.0.1:6379 takes no connection from here: set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as"
    )
    assert done.stdout.startswith(says), done.stderr


@pytest.mark.usefixtures("shared_cluster")
def test_a_head_is_known_also_where_it_takes_no_connection(monkeypatch):
    address = ray.get_runtime_context().gcs_address
    assert is_head(address)
    (node,) = ray.nodes()
    assert not is_head(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    assert is_head(address)


@pytest.mark.usefixtures("shared_cluster")
def test_it_is_asked_without_modules_of_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text(f"raise SystemExit({ray_head._NO_HEAD})")
    monkeypatch.chdir(tmp_path)
    assert is_head(ray.get_runtime_context().gcs_address)
