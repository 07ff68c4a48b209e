"""The folder of a server: its arguments, why it does not start, and the calls of its workers.

A call is a file, and so is the answer of each worker.

SGLang notifies all its workers of a weight update, but passes them only tensors, and returns nothing. The folder is
readable only by this user, and no call comes over the network.
"""

import os
import pickle
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "MEGARL_SGLANG_CALLS"
"""The environment variable with the folder's path, for workers."""
ARGUMENTS = "arguments.json"
"""The file with the arguments of the server."""
REFUSED = "refused"
"""The file with the reason, in one sentence, why a server does not start."""
LOAD_FORMAT = "megarl"
"""The `load_format` of an update that stands for a call."""


class WorkerCallError(RuntimeError):
    """A worker of SGLang failed in a call; the message has its traceback."""


class CallFolder:
    """The files of one call at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_server(cls) -> "CallFolder":
        """The call folder of the server that this worker process belongs to."""
        return cls(Path(os.environ[FOLDER_VARIABLE]))

    def put_call(self, method: str, arguments: Sequence[Any]) -> None:
        """Write the call that the workers are to execute next."""
        for answer in self._folder.glob("answer.*"):
            answer.unlink()
        self._put("call", pickle.dumps((method, tuple(arguments))))

    def answer(self, number: int, worker: Any) -> None:
        """Execute the call in worker `number`, and write its outcome."""
        method, arguments = pickle.loads((self._folder / "call").read_bytes())
        try:
            came = (True, getattr(worker, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again where the call comes from
            came = (False, error)
        self._put(f"answer.{number}", _pickled(*came))

    def take_answers(self, workers: int) -> list[Any]:
        """Return the results of all workers.

        Raises the error of the first that failed; WorkerCallError if one did not answer.
        """
        results = []
        for worker in range(workers):
            file = self._folder / f"answer.{worker}"
            if not file.exists():
                raise WorkerCallError(f"worker {worker} of SGLang did not answer a call: its log says why")
            succeeded, result = pickle.loads(file.read_bytes())
            if not succeeded:
                raise result
            results.append(result)
        return results

    def _put(self, name: str, data: bytes) -> None:
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(data)
        partial.replace(self._folder / name)


def _pickled(succeeded: bool, result: Any) -> bytes:
    try:
        data = pickle.dumps((succeeded, result))
        pickle.loads(data)
    except Exception:
        # Some libraries' exceptions cannot be pickled; their text can.
        if succeeded:
            raise
        return pickle.dumps((False, WorkerCallError("".join(traceback.format_exception(result)))))
    return data
