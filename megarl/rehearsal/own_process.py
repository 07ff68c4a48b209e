"""Runs rehearsals of ranks and workers in a separate process without GPUs, so that none of their state stays behind."""

import os
import pickle
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any

from converters.errors import UserError

_ENVIRONMENT = {
    # Modules are built for a CPU; none of their memory is allocated.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def call_apart(module: str, function: str, *arguments: Any) -> Any:
    """Call a function of a module in a new process, so that only that imports it.

    Re-raises its UserError, and raises one if the system kills the process.

    Example: call_apart("megarl.rehearsal.trainer_rank", "rehearse_ranks", rank_model, [0, 32], size)
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=pickle.dumps((module, function, arguments)),
        stdout=subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT},
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        raise UserError(
            f"the system killed the process of {module}.{function}, as it does where memory runs out: free memory on"
            " this machine, or raise the limit of its container or batch job"
        )
    if done.returncode:
        raise RuntimeError(f"the process of {module}.{function} ended with {done.returncode}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, UserError):
        raise answer
    return answer


def main() -> None:
    """Call what standard input asks for, and write the answer to standard output."""
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
    main()
