"""A process that scores: a program of its own, because what a policy wrote may make any function hang or crash.

It is two processes. The one that was started watches the other, ends all that functions have started when that one
has ended or the asking process says so, and then ends in the same manner. The other reads pickled requests, each behind
its length, and answers each by a line of JSON with the number of the request. Both die with the process that started
them, also if that one is killed, and import nothing but the reward functions.
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
"""The exit code of a process whose functions have closed the connection to the asking process."""

_SHOWN_CHARACTERS = 2000


def main(parent: int, memory_bytes: int) -> None:
    """Load functions and score with them until the input ends."""
    requests, replies = _own_streams()
    sys.path[:] = _read(requests)["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _supervise(parent, requests, replies)
    # Private writable memory counts, other than under RLIMIT_AS: libraries of a user's function may map a lot.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    process, functions = os.getpid(), list[Any]()
    while True:
        request = _read(requests)
        reply = _load(functions, request) if "load" in request else _score(functions[request["call"]], request)
        if os.getpid() != process:
            os._exit(0)  # the function forked and let its child return, too: its parent's answer is the one
        _write(replies, {"number": request["number"], **reply})


def _supervise(parent: int, requests: BinaryIO, replies: BinaryIO) -> None:
    """Go on in a child of this process, which stays behind."""
    from megarl.sandbox import process_tree

    process_tree.die_with(parent, signal.SIGTERM)
    process_tree.adopt_orphans()
    supervisor = os.getpid()
    child = process_tree.fork()
    if not child:
        process_tree.die_with(supervisor, signal.SIGKILL)
        return
    requests.close()  # the asking process is to hear of the child's end at once
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
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - a class of a user's own may do anything
        message = "(it cannot be shown)"
    return f"{type(error).__name__}: {message}"[:_SHOWN_CHARACTERS]


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """The connection to the asking process, out of reach of what functions read and print."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # Its own buffer keeps lines back until there are many, and nobody would see those of a last sample.
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
    """Make reads of a stream block again: a reward function may have made them non-blocking."""
    os.set_blocking(stream.fileno(), True)


def _lose_connection() -> NoReturn:
    os._exit(CONNECTION_LOST)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
