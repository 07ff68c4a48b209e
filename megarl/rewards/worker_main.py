"""The scoring process: a program of its own, since a response may make any reward function hang or crash.

It consists of two processes. The first is a supervisor: when its child ends or the asking process terminates it, it
kills all descendants and then ends in the same way as the child. The child reads pickled requests, each preceded by
its length, and answers each with a line of JSON that contains the number of the request. Both die with the process
that started them, even if that is killed, and import only the reward functions.
"""

import asyncio
import inspect
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, BinaryIO, NoReturn

LONGEST_REPLY_BYTES = 16 * 1024**2
CONNECTION_LOST = 113
"""Exit code if a function has closed the connection to the asking process."""

_SHOWN_CHARACTERS = 2000


def main(parent: int, memory_bytes: int) -> None:
    """Load functions and score with them until the input ends."""
    requests, replies = _own_streams()
    sys.path[:] = _read(requests)["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _supervise(parent, requests, replies)
    # RLIMIT_DATA, not RLIMIT_AS: it counts private writable memory only, and libraries of a function may map a lot.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    process, functions = os.getpid(), list[Any]()
    while True:
        request = _read(requests)
        reply = _load(functions, request) if "load" in request else _score(functions[request["call"]], request)
        if os.getpid() != process:
            os._exit(0)  # the function forked and its child returned, too: only the parent answers
        _write(replies, {"number": request["number"], **reply})


def _supervise(parent: int, requests: BinaryIO, replies: BinaryIO) -> None:
    """Fork: return in the child, and stay in the parent as its supervisor."""
    from megarl.sandbox import process_tree

    process_tree.die_with(parent, signal.SIGTERM)
    process_tree.adopt_orphans()
    supervisor = os.getpid()
    child = process_tree.fork()
    if not child:
        process_tree.die_with(supervisor, signal.SIGKILL)
        return
    requests.close()  # so that the asking process notices the end of the child at once
    replies.close()
    ended = process_tree.wait_end(child)
    process_tree.kill_descendants()
    if ended.told or ended.code < 0:
        process_tree.end_by(ended.told or -ended.code)
    os._exit(ended.code)


def _load(functions: list[Any], request: Mapping[str, Any]) -> dict[str, Any]:
    from converters.errors import UserError
    from megarl.rewards.registry import calling_of

    source = request["load"]
    try:
        functions.append(source.load())
        return {"calling": calling_of(functions[-1])._asdict()}
    except UserError as error:
        return {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - a file may raise anything
        return {"error": f"{source.key}={source.spec}: loading it failed with {_shown(error)}"}


def _score(function: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from megarl.rewards.scoring import as_score

    try:
        result = function(**request["arguments"])
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except BaseException as error:  # noqa: BLE001 - even SystemExit is a failure of the function, not our end
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
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - a user-defined class may raise anything
        message = "(it cannot be shown)"
    return f"{type(error).__name__}: {message}"[:_SHOWN_CHARACTERS]


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the connection to the asking process away from stdin and stdout, which functions may use."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # stdout's own buffer would hold lines back, and those of the last sample would be lost.
    sys.stdout = sys.stderr
    return requests, replies


def _read(requests: BinaryIO) -> dict[str, Any]:
    try:
        _wait_for(requests)
        length = requests.read(8)
        body = requests.read(int.from_bytes(length))
    except OSError:
        _lose_connection()
    if len(length) < 8:
        sys.exit()
    return pickle.loads(body)


def _write(replies: BinaryIO, reply: dict[str, Any]) -> None:
    line = json.dumps(reply).encode() + b"\n"
    if len(line) > LONGEST_REPLY_BYTES:
        too_long = f"its result is of {len(line)} bytes, more than {LONGEST_REPLY_BYTES}"
        line = json.dumps({"number": reply["number"], "error": too_long}).encode() + b"\n"
    try:
        _wait_for(replies)
        replies.write(line)
        replies.flush()
    except OSError:
        _lose_connection()


def _wait_for(stream: BinaryIO) -> None:
    """Make a stream blocking again, in case a reward function has made it non-blocking."""
    os.set_blocking(stream.fileno(), True)


def _lose_connection() -> NoReturn:
    os._exit(CONNECTION_LOST)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
