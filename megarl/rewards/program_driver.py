"""Driver in the sandbox for programs that calls or test code test: runs program and test, and prints the result.

Reads a program, test code or a call, and a token from stdin. Its last line is the token and the result as JSON, so the
line is there only if everything succeeded. The program's `__name__` is not "__main__", so code guarded by that is not
run.
"""

import builtins
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any


def main() -> None:
    """Run the request that is read from stdin."""
    request = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    program = types.ModuleType("program")
    sys.modules["program"] = program  # dataclasses and pickle look up a class's module there
    before: dict[str, Any] = {}
    exec(request["before"], before)
    vars(builtins).update(before)  # not into the module: a missing function must not be found among the imports
    for name in ("program", "tests"):
        exec(compile(request[name], f"{name}.py", "exec", dont_inherit=True), vars(program))
    result = _call(program, request["call"]) if request["call"] else None
    print(f"\n{request['token']}{json.dumps(result)}", file=sys.__stdout__)


def _call(program: types.ModuleType, call: Mapping[str, Any]) -> Any:
    """Call a method of the class Solution, as in LeetCode's programs, or else a function; returns the result."""
    name: str = call["name"]
    solution: Any = getattr(program, "Solution", None)
    # An instance may have attributes that its class lacks, but not every class can be instantiated without arguments.
    is_method = hasattr(solution, name) or (solution is not None and not hasattr(program, name))
    return getattr(solution() if is_method else program, name)(*call["arguments"])


if __name__ == "__main__":
    main()
