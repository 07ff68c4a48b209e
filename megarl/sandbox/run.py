"""Runs a program in a sandbox, from the caller's side."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

End = Literal["exited", "timed_out", "too_much_output"]

_FOLDER_OF_PACKAGES = str(Path(__file__).parents[2])
_SUPERVISOR = """
import sys
sys.path.append(sys.argv[1])
from megarl.sandbox.supervisor import main
sys.exit(main(*map(int, sys.argv[2:])))
"""
_START_ALLOWANCE_S = 10.0
_READ_BYTES = 65536
_TIME_IS_OVER = (-signal.SIGALRM, 128 + signal.SIGXCPU)
"""Exit codes if the supervisor's timer, or the limit of CPU time, ended the program."""


class SandboxUnavailableError(Exception):
    """This machine does not allow what the isolation needs."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program. Memory is per process; `file_bytes` limits each file, in namespaces also all together."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    processes: int
    file_bytes: int
    open_files: int
    output_bytes: int


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    `code` is its exit code, or 128 plus the number of the signal that ended it; `output` is its stdout, up to the
    limit.
    """

    end: End
    code: int
    output: bytes


def run(program: str, stdin: bytes, limits: Limits, isolation: str) -> Finished:
    """Run Python source with this interpreter; on return, none of its processes are left, nor its folder.

    `isolation` is a name of `supervisor.ISOLATIONS`. Raises `SandboxUnavailableError` if the machine does not allow it.
    """
    request = json.dumps({"program": program, "isolation": isolation, **asdict(limits)}).encode()
    heard, said = os.pipe()
    with _memory_file(request) as request_file, _memory_file(stdin) as stdin_file, os.fdopen(heard, "rb") as complaint:
        fds = (request_file.fileno(), said)
        try:
            # -I, so that neither the user's settings nor the current folder affect what is imported.
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-c", _SUPERVISOR, _FOLDER_OF_PACKAGES, *map(str, (os.getpid(), *fds))],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            os.close(said)
        try:
            end, output = _read(supervisor, limits)
        finally:
            code = _end(supervisor)
        if message := complaint.read():
            raise SandboxUnavailableError(message.decode())
    return Finished("timed_out" if code in _TIME_IS_OVER else end, code, output)


def _read(supervisor: "subprocess.Popen[bytes]", limits: Limits) -> tuple[End, bytes]:
    """Read until no writer is left. The supervisor enforces the time; the limit here is in case it fails to."""
    assert supervisor.stdout is not None
    stream, output = supervisor.stdout.fileno(), bytearray()
    deadline = time.monotonic() + limits.wall_s + _START_ALLOWANCE_S
    readable = select.poll()  # select() refuses descriptors from 1024 on, which a process of many connections has
    readable.register(stream, select.POLLIN)
    while True:
        if not readable.poll(1000 * max(deadline - time.monotonic(), 0.0)):
            return "timed_out", bytes(output)
        data = os.read(stream, _READ_BYTES)
        if not data:
            return "exited", bytes(output)
        output += data
        if len(output) > limits.output_bytes:
            return "too_much_output", bytes(output[: limits.output_bytes])


def _end(supervisor: "subprocess.Popen[bytes]") -> int:
    assert supervisor.stdout is not None
    supervisor.stdout.close()
    if supervisor.poll() is None:
        supervisor.send_signal(signal.SIGTERM)  # it then ends all its descendants
    return supervisor.wait()


def _memory_file(content: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(content)
    file.seek(0)
    return file
