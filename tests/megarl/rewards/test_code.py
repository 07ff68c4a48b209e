import json
import tracemalloc

import pytest

from converters.errors import UserError
from megarl.rewards import RewardTimedOut, Scorer, load_reward, reward_arguments
from megarl.rewards.code import CodeOptions, code
from megarl.sandbox.run import SandboxUnavailableError
from megarl.schema import RewardConfig

ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = {"inputs": ["1 2", "3 4\n", "0 0"], "outputs": ["3", "7\n", "0"]}
ROWS = [{"input": "1 2", "output": "3", "testtype": "stdin_stdout"}, {"input": "3 4", "output": "7", "metadata": None}]
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"


def fenced(program, language="python"):
    return f"Here it is:\n```{language}\n{program}\n```\nas you asked."


def score(solution, ground_truth, **options):
    return code("any", solution, ground_truth, {}, **options)


@pytest.mark.parametrize(
    ("solution", "ground_truth", "value"),
    [
        (fenced(ADDS), SUMS, 1.0),
        (fenced(ADDS, ""), json.dumps(SUMS), 1.0),
        (fenced(ADDS), ROWS, 1.0),
        (fenced(ADDS), json.dumps(ROWS), 1.0),
        (fenced("print(3)"), json.dumps(ROWS), 0.0),
        (fenced(ADDS.replace("+", "-")), SUMS, 0.0),
        (fenced("1 / 0") + fenced(ADDS), SUMS, 1.0),
        (fenced(ADDS) + fenced("my sh", "sh"), SUMS, 1.0),
        (ADDS, SUMS, 0.0),
        (fenced(ADDS)[:-20], SUMS, 0.0),  # the fence is never closed
        (fenced("print('3  \\n\\n')"), {"inputs": [""], "outputs": ["3"]}, 1.0),
        (fenced("print(3)\nraise SystemExit(1)"), {"inputs": [""], "outputs": ["3"]}, 0.0),
        (fenced("def add(a, b):\n    return a + b"), ASSERTS, 1.0),
        (fenced("def add(a, b):\n    return a - b"), ASSERTS, 0.0),
        (fenced("def add(a, b):\n    print('chatty')\n    return a + b"), ASSERTS, 1.0),
        (fenced("import sys\nsys.exit(0)"), ASSERTS, 0.0),
        (fenced("import os\nos._exit(0)"), ASSERTS, 0.0),
        (fenced("def add(a, b): return 3\nprint('"), ASSERTS, 0.0),
        (fenced("def add(a, b): return a + b\nif __name__ == '__main__': print(int(input()))"), ASSERTS, 1.0),
        (fenced("import sys\nprint(open(sys.argv[0]).read() + input())"), ASSERTS, 0.0),
        (fenced("\ud800"), SUMS, 0.0),
        (fenced("#" * 2**21), SUMS, 0.0),
    ],
)
def test_a_program_is_judged_by_its_tests(solution, ground_truth, value):
    assert score(solution, ground_truth)["score"] == value


@pytest.mark.parametrize(
    ("printed", "expected", "value"),
    [
        *((" 1 2", "1 2", 1.0), ("\n1\n 2\n", "1\n2", 1.0), ("1\n2", "1\n\n2", 0.0), ("1\n2", "1", 0.0)),
        *(("0.5", "0.500000\n", 1.0), ("1  2", "1 2", 1.0), ("1e3 -0", "1000 0.0", 1.0), ("0.5", "0.50001", 0.0)),
        *(("1 2 3", "1 2", 0.0), ("50000000000000000", "50000000000000001", 0.0), ("a  b", "a b", 0.0)),
        *(("1\u20282", "1\n2", 0.0), ("1\x0c2", "1\x0c2", 1.0), ("", "1", 0.0)),
        *(("nan", "1", 0.0), ("sNaN", "1", 0.0), ("1e9999999999999999999", "1", 0.0), ("x 1.0", "x 1", 0.0)),
    ],
)
def test_lines_are_compared_as_livecodebench_compares_them(printed, expected, value):
    assert score(fenced(f"print({printed!r})"), {"inputs": [""], "outputs": [expected]})["score"] == value


LONG = "12 " * 2**19


@pytest.mark.parametrize(
    ("program", "ground_truth"),
    [
        ("print('12 ' * 2**19)", {"inputs": [""], "outputs": [LONG]}),
        ("def apply(): return '12 ' * 2**19", {"fn_name": "apply", "inputs": [[]], "outputs": [LONG]}),
    ],
)
def test_as_much_may_be_printed_as_is_expected(program, ground_truth):
    assert score(fenced(program), ground_truth)["score"] == 1.0
    assert score(fenced(program.replace("2**19", "2**21")), ground_truth)["score"] == 0.0


def test_a_program_that_is_too_long_takes_no_memory_for_its_tests():
    tracemalloc.start()
    try:
        result = score(fenced("#" * 2**21), {"fn_name": "f", "inputs": ["1"] * 99, "outputs": ["1"] * 99})
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result["score"] == 0.0
    assert most_bytes < 32 * 2**20


def test_the_longest_program_leaves_room_for_its_files():
    # Escaped in the file that runs it, such a program takes four times its size.
    program = "print(open('a', 'wb').write(bytes(2**21)))  # "
    long = program + "\x01" * (2**20 - len(program) - 1)
    assert score(fenced(long), {"inputs": [""], "outputs": [str(2**21)]}, file_mb=2)["score"] == 1.0


def test_neither_the_tests_nor_their_token_are_in_the_programs_file():
    # It prints the last line of its own file's texts, where the token of test code used to be, and leaves.
    finds = (
        'import os\nprint(open(\'program.py\').read().rsplit("\\\\n", 1)[1].split("\'")[0], flush=True)\nos._exit(0)'
    )
    assert score(fenced(finds), ASSERTS)["score"] == 0.0


CALLED = "def apply(a, b):\n    return [a + b]"
CALLED_ONCE = {"fn_name": "apply", "inputs": [[1, 2]], "outputs": [[3]]}
DEEP = """
import json
json.dumps = lambda _: "[" * 10**5 + "]" * 10**5
def apply(a, b):
    pass
"""
IN_CLASS = "class Solution:\n    def apply(self, a: int, b: List[int]) -> Optional[int]:\n        return a + b[0]"


@pytest.mark.parametrize(
    ("program", "ground_truth", "value"),
    [
        (CALLED, {"fn_name": "apply", "inputs": ["1\n2", "3\n4\n"], "outputs": ["[3]", "[7]"]}, 1.0),
        (CALLED, {"fn_name": "apply", "inputs": ["1\n2", "3\n4\n"], "outputs": ["[3]", "[8]"]}, 0.0),
        (CALLED, {"fn_name": "apply", "inputs": ["1\n2"], "outputs": ["3"]}, 0.0),
        (CALLED, {"fn_name": "apply", "inputs": ['"a\u2028"\n"b\x85"'], "outputs": ['["a\u2028b\x85"]']}, 1.0),
        (CALLED, {"fn_name": "apply", "inputs": [["a", "b"]], "outputs": [["ab"]]}, 1.0),
        (CALLED, {"fn_name": "apply", "inputs": [[1, 2]], "outputs": [[[3]]]}, 1.0),
        (CALLED, {"fn_name": "other", "inputs": [[1, 2]], "outputs": [[3]]}, 0.0),
        ("def apply(a): return a", {"fn_name": "apply", "inputs": ["1"], "outputs": ["[1]"]}, 0.0),
        (IN_CLASS, {"fn_name": "apply", "inputs": ["1\n[2]"], "outputs": ["3"]}, 1.0),
        (
            IN_CLASS,
            [{"input": "1\n[2]", "output": "3", "testtype": "functional", "metadata": {"func_name": "apply"}}],
            1.0,
        ),
        (f"import sys\nsys.set_int_max_str_digits(0)\n{CALLED.replace('a + b', '10**5000')}", CALLED_ONCE, 0.0),
        (DEEP, CALLED_ONCE, 0.0),
        ("print(3)", {"fn_name": None, "inputs": ["1"], "outputs": ["3"]}, 1.0),
    ],
)
def test_a_function_is_called_where_the_ground_truth_names_one(program, ground_truth, value):
    assert score(fenced(program), ground_truth)["score"] == value


def method(name, *lines):
    return "\n".join(
        ["class Solution:", f"    def {name}(self, a: List[int]) -> int:", *(f"        {x}" for x in lines)]
    )


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (method("apply", "return heapq.nsmallest(1, a)[0]"), "apply"),
        (method("apply", "return min(min(a), inf, gcd(*a), pow(2, 9, 8) + 9)"), "apply"),
        (method("apply", "d = defaultdict(int)", "d[1] = collections.Counter(a)[1]", "return d[1]"), "apply"),
        (method("apply", "return a[0] - 2 if len(a) == 2 else self.apply(a[:2])"), "apply"),
        (method("apply", "f = lambda n: 1 if n == 0 else f(n - 1)", "return f(5000)"), "apply"),
        (method("merge", "return 1"), "merge"),  # heapq has one, too
        (method("apply", "return 1") + "\n\ndef apply(a): return 2", "apply"),
        ("class Solution: pass\n\ndef apply(a): return 1", "apply"),
        ("class Solution:\n    def __init__(self, n): pass\n\ndef apply(a): return 1", "apply"),
        ("class Solution:\n    def __init__(self): self.apply = lambda a: 1", "apply"),
        ("class Solution:\n    def __getattr__(self, name): return lambda a: 1", "apply"),
        ("from __future__ import annotations\n" + method("reduce", "return 1"), "reduce"),
    ],
)
def test_a_called_program_gets_what_livecodebench_gives_it(program, name):
    assert score(fenced(program), {"fn_name": name, "inputs": ["[3, 1]"], "outputs": ["1"]})["score"] == 1.0


def test_what_a_program_lacks_is_not_called_instead_of_it():
    truth = {"fn_name": "gcd", "inputs": ["4\n6"], "outputs": ["2"]}
    assert score(fenced("x = 1"), truth)["score"] == 0.0
    assert score(fenced("def gcd(a, b): return math.gcd(a, b)"), truth)["score"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "print(heapq.nsmallest(1, map(int, sys.stdin.read().split()))[0])",
        "def f(n): return 1 if n == 0 else f(n - 1)\nprint(f(5000))",
        "'Says one.'\nfrom __future__ import annotations\ndef f(n: Unknown): print(gcd(n, 1))\nf(2)",
        "if __name__ == '__main__':\n    print(1)",
        "import inspect\ndef f(): return '''\u2028\r\x0c'''\nclass A: pass\nprint(inspect.getsource(A).count('A'))",
        "import inspect\ndef f():\n    return '{}'\nprint(inspect.getsource(f).count('{}'))",
    ],
)
def test_a_program_of_stdin_gets_what_livecodebench_gives_it(program):
    assert score(fenced(program), {"inputs": ["3 1"], "outputs": ["1"]})["score"] == 1.0


@pytest.mark.parametrize(
    ("program", "ground_truth"),
    [
        ("print(10**int(input()))", {"inputs": ["5000"], "outputs": [f"1{'0' * 5000}"]}),
        ("print(int(input()) % 7)", {"inputs": [f"1{'0' * 5000}"], "outputs": [str(10**5000 % 7)]}),
        ("def f(n): return len(str(10**n))", {"fn_name": "f", "inputs": ["5000"], "outputs": ["5001"]}),
    ],
)
def test_integers_may_have_as_many_digits_as_livecodebench_allows(program, ground_truth):
    assert score(fenced(program), ground_truth)["score"] == 1.0


def test_test_code_may_stand_in_for_what_a_program_calls():
    tests = "from unittest.mock import patch\nwith patch('builtins.input', lambda: '3'):\n    assert ask() == 3"
    assert score(fenced("def ask(): return int(input())"), tests)["score"] == 1.0


def test_the_share_of_passed_tests_counts_where_asked_for():
    two_of_three = fenced("print(3 if input() == '1 2' else 0)")
    assert score(two_of_three, SUMS, partial=True)["score"] == pytest.approx(2 / 3)
    # All or nothing: what follows the first failure is not run.
    assert score(two_of_three, SUMS) == {
        "score": 0.0,
        "passed": pytest.approx(1 / 3),
        "timed_out": 0.0,
        "unchecked": 0.0,
    }


def test_what_takes_too_long_fails_and_is_counted():
    slow = fenced("import time\nif input() == '1 2': time.sleep(60)\nprint(7)")
    result = score(slow, SUMS, partial=True, timeout_s=5.0)
    assert result == {"score": pytest.approx(1 / 3), "passed": pytest.approx(1 / 3), "timed_out": 1.0, "unchecked": 0.0}


def test_a_part_of_a_second_is_not_cut_off():
    assert CodeOptions(timeout_s=1.5).limits.cpu_s == 3


def test_the_share_so_far_counts_where_time_is_over():
    slow = fenced(f"import time\ntime.sleep(1.2)\n{ADDS}")
    result = score(slow, SUMS, partial=True, timeout_s=30.0, all_tests_s=31.0)
    assert result == {"score": pytest.approx(1 / 3), "passed": pytest.approx(1 / 3), "timed_out": 0.0, "unchecked": 1.0}


def test_tests_that_run_into_the_timeout_of_the_sample_are_timed_out():
    config = RewardConfig(function="code", workers=1, timeout_s=2.0)
    with Scorer(config) as scorer:
        (outcome,) = scorer.score([reward_arguments("any", fenced("import time\ntime.sleep(60)"), SUMS, {})])
    assert isinstance(outcome, RewardTimedOut)


def test_the_limits_are_the_options():
    hungry = fenced("x = bytearray(200 * 2**20)\nprint(len(x))")
    truth = {"inputs": [""], "outputs": [str(200 * 2**20)]}
    assert score(hungry, truth, memory_mb=512)["score"] == 1.0
    assert score(hungry, truth, memory_mb=128)["score"] == 0.0


@pytest.mark.parametrize(
    "ground_truth",
    [
        *("", 7, {}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, {"inputs": "1", "outputs": "1"}),
        *("{1", "[1", "[]", "[1, 2]", '[{"input": "1"}]', '[{"input": "1", "output": "2", "testtype": "image"}]'),
        {"inputs": ["1", "2"], "outputs": ["", "\n"]},
        {"inputs": ["1"], "outputs": ["2"], "import_statement": "import math"},
        {"inputs": [[1]], "outputs": [[2]]},
        {"fn_name": "f", "inputs": ["1"], "outputs": ["no JSON"]},
        '[{"input": "1", "output": "2", "testtype": "functional"}]',
    ],
)
def test_other_ground_truths_are_refused(ground_truth):
    with pytest.raises(ValueError, match="ground truth of code must be"):
        score(fenced(ADDS), ground_truth)


@pytest.mark.parametrize("tests", ["def check(candidate):\n    assert candidate(1, 2) == 3\n", "x = 1", "# none"])
def test_test_code_that_tests_nothing_is_refused(tests):
    with pytest.raises(ValueError, match=r"the ground truth of code tests nothing.*call what it defines"):
        score(fenced("def add(a, b): return 0"), tests)


def test_a_machine_without_isolation_is_told_when_the_reward_is_loaded(monkeypatch):
    def refuse(*arguments):
        raise SandboxUnavailableError("unshare failed: Operation not permitted")

    monkeypatch.setattr("megarl.rewards.code.run", refuse)
    with pytest.raises(UserError, match=r"isolation=namespaces on this machine: unshare failed.*isolation=limits"):
        load_reward("code")


def test_a_machine_without_a_user_for_programs_is_not_told_to_take_another_isolation(monkeypatch):
    def refuse():
        raise OSError("this container has no number that nobody has")

    monkeypatch.setattr("megarl.rewards.code.another_user", refuse)
    with pytest.raises(UserError, match=r"isolation=limits on this machine: this container has no number") as raised:
        load_reward("code", {"isolation": "limits"})
    assert "isolation=namespaces" not in str(raised.value)


def test_a_sandbox_in_which_nothing_runs_is_refused_when_the_reward_is_loaded():
    with pytest.raises(
        UserError, match=r"an empty program timed out with code -14, so all would fail; raise timeout_s"
    ):
        load_reward("code", {"timeout_s": 0.001})
