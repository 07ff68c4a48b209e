"""Runs rehearsals of ranks and workers in a separate process without GPUs, so that none of their state stays behind."""

import os
import pickle
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any, Self

from converters.errors import UserError
from megarl.sandbox import process_tree

_ENVIRONMENT = {
    # Modules are built for a CPU; none of their memory is allocated.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


class OwnProcesses:
    """Calls functions in new processes, so that only those import their modules; they end with this process.

    As a context, it kills those that are still running when an error leaves it: other threads would wait for theirs.
    """

    def __init__(self) -> None:
        self._running = set[subprocess.Popen[bytes]]()
        self._are_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            self._are_over = True  # for one that a thread is about to start
            for process in list(self._running):
                process.kill()

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function of a module, and return what it returns.

        Re-raises its UserError, and raises one if the system kills the process.

        Example: call("megarl.rehearsal.trainer_rank", "rehearse_ranks", rank_model, [0, 32], size)
        """
        with subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            # Ctrl-C is for this process, and would make that one print a traceback.
            start_new_session=True,
        ) as process:
            self._running.add(process)
            try:
                if self._are_over:
                    process.kill()
                output, _ = process.communicate(pickle.dumps((module, function, arguments)))
            except BaseException:
                process.kill()
                raise
            finally:
                self._running.discard(process)
        if process.returncode == -signal.SIGKILL:
            raise UserError(
                f"the system killed the process of {module}.{function}, as it does where memory runs out: free memory"
                " on this machine, or raise the limit of its container or batch job"
            )
        if process.returncode:
            raise RuntimeError(f"the process of {module}.{function} ended with {process.returncode}")
        answer = pickle.loads(output)
        if isinstance(answer, UserError):
            raise answer
        return answer


def main(parent: int) -> None:
    """Call what standard input asks for, and write the answer to standard output; die with the process `parent`."""
    process_tree.die_with(parent, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Other output must not mix with the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, function, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = getattr(import_module(module), function)(*arguments)
    except UserError as error:
        answer = error
    with answers:
        answers.write(pickle.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
