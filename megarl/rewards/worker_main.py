"""A process that scores: a program of its own, because what a policy wrote may make any function hang or crash.

It reads pickled requests, each behind its length, and answers each by a line of JSON. It dies with the process that
started it, also if that one is killed, and imports nothing but the reward functions.
"""

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1
_SHOWN_CHARACTERS = 2000


def main(parent: int, memory_bytes: int) -> None:
    """Load the functions of the first request, then score until the input ends."""
    _die_with(parent)
    requests, replies = _own_streams()
    # What is private and writable counts, other than under RLIMIT_AS: libraries of a user's function may map a lot.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = _read(requests)
    sys.path[:] = setup["path"]
    try:
        functions = _load(setup["functions"])
        reply: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - the asking process raises it
        reply = {"error": _shown(error)}
    _write(replies, reply)
    while True:
        request = _read(requests)
        _write(replies, _score(functions[request["function"]], request["arguments"]))


def _load(specs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    from megarl.rewards.registry import load_reward

    return [load_reward(spec, options) for spec, options in specs]


def _score(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    from megarl.rewards.scoring import as_score

    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except BaseException as error:  # noqa: BLE001 - also SystemExit is the function's failure, not the process's end
        exhausted = isinstance(error, MemoryError | RecursionError)
        return {"error": f"it raised {_shown(error)}", "exhausted": exhausted}
    try:
        score = as_score(result)
    except ValueError as error:
        return {"error": str(error)[:_SHOWN_CHARACTERS]}
    return {"value": score.value, "parts": score.parts}


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be followed


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the asking process, out of reach of what functions read and print."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO) -> dict[str, Any]:
    length = requests.read(8)
    if len(length) < 8:
        sys.exit()
    return pickle.loads(requests.read(int.from_bytes(length)))


def _write(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
