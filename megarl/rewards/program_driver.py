"""Driver that the sandbox runs for a program which is called, or tested by code: it does both, and says the result.

The program, the code or the call, and a token come on stdin. The last line is the token and the result as JSON, so it
is there only where all went well. The program's name is not "__main__": what it guards by that is not run.
"""

import builtins
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any


def main() -> None:
    """Run the request on stdin."""
    request = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    program = types.ModuleType("program")
    sys.modules["program"] = program  # dataclasses and pickle look a class's module up there
    before: dict[str, Any] = {}
    exec(request["before"], before)
    vars(builtins).update(before)  # not its own names: what it lacks is not called instead of it
    for name in ("program", "tests"):
        exec(compile(request[name], f"{name}.py", "exec", dont_inherit=True), vars(program))
    result = _call(program, request["call"]) if request["call"] else None
    print(f"\n{request['token']}{json.dumps(result)}", file=sys.__stdout__)


def _call(program: types.ModuleType, call: Mapping[str, Any]) -> Any:
    """The result of a method of the class Solution, as LeetCode has it, or else of a function."""
    name: str = call["name"]
    solution: Any = getattr(program, "Solution", None)
    # An instance may have what its class lacks, but not every one can be made without arguments.
    is_method = hasattr(solution, name) or (solution is not None and not hasattr(program, name))
    return getattr(solution() if is_method else program, name)(*call["arguments"])


if __name__ == "__main__":
    main()
