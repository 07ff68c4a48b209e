"""The folder of a server: its arguments, why it does not start, and the calls of its workers.

A call is a file, and so is the answer of each worker.

SGLang tells all its workers of an update of weights, but brings nothing beside tensors to them, and nothing back. The
folder is this user's alone: what is called never comes over the network.
"""

import os
import pickle
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "MEGARL_SGLANG_CALLS"
"""The environment variable that tells a worker the folder."""
ARGUMENTS = "arguments.json"
"""The file with the arguments of the server."""
REFUSED = "refused"
"""The file with the one sentence of a server that does not start."""
LOAD_FORMAT = "megarl"
"""The `load_format` of an update that is a call."""


class WorkerCallError(RuntimeError):
    """A worker of SGLang failed in a call; the message has its traceback."""


class CallFolder:
    """The files of one call at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_server(cls) -> "CallFolder":
        """The folder of the server whose worker this process is."""
        return cls(Path(os.environ[FOLDER_VARIABLE]))

    def put_call(self, method: str, arguments: Sequence[Any]) -> None:
        """Write the call of a method that the workers carry out next."""
        for answer in self._folder.glob("answer.*"):
            answer.unlink()
        self._put("call", pickle.dumps((method, tuple(arguments))))

    def answer(self, number: int, worker: Any) -> None:
        """Carry the call out in a worker, which has this number, and write what came of it."""
        method, arguments = pickle.loads((self._folder / "call").read_bytes())
        try:
            came = (True, getattr(worker, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again where the call comes from
            came = (False, error)
        self._put(f"answer.{number}", _pickled(*came))

    def take_answers(self, workers: int) -> list[Any]:
        """The results of all workers. Raises what the first that failed raised; WorkerCallError for no answer."""
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
        # Some exceptions of libraries cannot be pickled; their text can.
        if succeeded:
            raise
        return pickle.dumps((False, WorkerCallError("".join(traceback.format_exception(result)))))
    return data
