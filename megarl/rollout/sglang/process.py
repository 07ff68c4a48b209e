"""Starts and ends the processes of one SGLang server."""

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from converters.errors import UserError
from megarl.process.own_programs import SAFE_PATH, with_programs_of
from megarl.process.ports import free_port
from megarl.process.scratch import scratch_folder
from megarl.rollout.sglang import cpu
from megarl.rollout.sglang.arguments import environment_of_context, server_arguments
from megarl.rollout.sglang.calls import ARGUMENTS, FOLDER_VARIABLE, REFUSED, CallFolder
from megarl.rollout.sglang.client import CallRefusedError, Client, ServerGoneError
from megarl.rollout.sglang.environment import server_environment
from megarl.rollout.sglang.installation import installation
from megarl.rollout.sglang.kind import SGLANG
from megarl.rollout.sglang.parent import PARENT_VARIABLE
from megatron_ext import device

_POLL_S = 0.1


class Server:
    """A server of the model in a folder; it is up once `start` has returned."""

    def __init__(self, model_path: Path, engine_args: Mapping[str, Any]) -> None:
        key, port = secrets.token_hex(16), free_port()
        with ExitStack() as left:
            # If this process is killed, the next server removes the folder, and everything that this server left.
            self._folder = left.enter_context(scratch_folder())
            python, paths = installation(device.device().type)
            arguments = server_arguments(model_path, engine_args, port, key)
            (self._folder / ARGUMENTS).touch(0o600)
            (self._folder / ARGUMENTS).write_text(json.dumps(arguments))
            self.first_version = int(arguments["weight_version"])
            environment = environment_of_context(model_path, engine_args)
            if device.backend() == "gloo":
                environment |= cpu.corrections.environment(SGLANG.workers(engine_args))
            environment = server_environment(os.environ, environment, bool(arguments.get("enable_memory_saver")))
            self._process = self._begin(python, paths, environment)
            self._left = left.pop_all()
        self.calls = CallFolder(self._folder)
        self.client = Client(f"http://127.0.0.1:{port}", key)

    def start(self) -> dict[str, Any]:
        """Wait until the server is up; return its description of itself.

        Raises UserError if it refuses its arguments, and RuntimeError if it exits for another reason, such as too
        little free memory or a kill, which may not recur.

        It may take as long as a run lets its engines take (`cluster.engine_start_timeout_s`).
        """
        while self._process.poll() is None:
            try:
                self.client.get("/model_info")
                return self.client.get("/server_info")
            except (ServerGoneError, CallRefusedError):
                time.sleep(_POLL_S)
        raise self._failure()

    def wait(self) -> int:
        """Wait until the server exits; return its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Kill all processes of the server, and remove what they left."""
        self.client.close()
        # The whole process group, including orphans.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._left.close()

    def _begin(self, python: str, paths: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {
            **environment,
            "PATH": with_programs_of(python, environment),
            "PYTHONPATH": os.pathsep.join([*paths, *given]),
            **SAFE_PATH,
            # Sockets and caches of a killed server are removed with its folder.
            "TMPDIR": str(self._folder),
            FOLDER_VARIABLE: str(self._folder),
            PARENT_VARIABLE: str(os.getpid()),
        }
        command = [python, "-m", "megarl.rollout.sglang.server", str(self._folder)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _failure(self) -> Exception:
        refused = self._folder / REFUSED
        if refused.exists():
            return UserError(refused.read_text())
        return RuntimeError(
            f"SGLang's server ended with exit code {self._process.returncode} before it served: its last lines say why"
        )
