"""Reward functions against the process that calls them, and against scores that are not their own."""

import asyncio
import os

import psutil
import pytest
from outcomes import values

from converters.errors import UserError
from megarl.rewards import Scorer, reward_arguments
from megarl.rewards.registry import Source
from megarl.rewards.worker import WorkerPool
from megarl.schema import RewardConfig

HEAD = "import asyncio, ctypes, json, os, resource, signal, sys, threading, time\n"
MARK = f"started-by-a-reward-of-{os.getpid()}"
DAEMON = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(120)", "{MARK}"])
    os._exit(0)
"""
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


def function_of(body, kind="def"):
    """A file with a function `score` that does `body`, whose i is the number that its sample should score."""
    lines = "\n    ".join(body.splitlines())
    return f"{HEAD}{kind} score({ARGUMENTS}):\n    i = extra_info['i']\n    {lines}\n    return float(i)\n"


def sample(number):
    return reward_arguments("any", "text", "truth", {"i": number})


def scorer_of(file, **config):
    return Scorer(RewardConfig(function=f"{file}:score", **{"workers": 1, "timeout_s": 30.0, **config}))


@pytest.fixture
def score(tmp_path):
    """Scores samples 1 to 5 with a function that does `body`, and drops what fails: values and what was said."""

    def score(body, kind="def", **config):
        file = tmp_path / "mine.py"
        file.write_text(function_of(body, kind))
        with scorer_of(file, on_error="drop", on_timeout="drop", **config) as scorer:
            scored = scorer.score([sample(number) for number in (1, 2, 3, 4, 5)])
        return values(scored)

    return score


def test_what_a_function_prints_is_seen_whether_or_not_much_follows(score, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    score("print('sample', i)")
    assert "sample 5\n" in capfd.readouterr().err


def marked():
    return [each for each in psutil.process_iter(["cmdline"]) if MARK in (each.info["cmdline"] or ())]


FORGERY = r"""
forged = b'{"number": %d, "value": 99.0, "parts": {}}\n' % i
for fd in range(3, 12):
    try: os.write(fd, forged)
    except OSError: pass
"""
RIGHT = [1.0, 2.0, 3.0, 4.0, 5.0]
ALL_SCORED = {
    "its fork returns, too": "os.fork()",
    "its fork fails": "if os.fork() == 0: 1 / 0",
    "its fork exits": "if os.fork() == 0: sys.exit(3)",
    "its fork stays": "if os.fork() == 0: time.sleep(120)",
    "writes to stdout": """os.write(1, b'{"value": 99.0, "parts": {}}\\n')""",
    "closes stdin and stdout": "os.closerange(0, 2)",
    "prints 20 MB": "print('x' * 20_000_000)",
    "leaves streams that do not wait": "for fd in (3, 4): os.set_blocking(fd, False)",
    "changes its limits": "resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))",
    "leaves a thread": "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "changes its folder": "os.chdir('/')",
    "changes its arguments": "extra_info.clear()",
    "ignores signals": "signal.signal(15, signal.SIG_IGN)",
}
SECOND_FAILS = {
    "forges scores": FORGERY,
    "forges without end": "os.set_blocking(4, False)\nwhile True: os.write(4, b'[' * 100_000)",
    "closes everything": "os.closerange(3, 100)",
    "exits": "sys.exit(0)",
    "exits at once": "os._exit(0)",
    "kills its watcher": "os.kill(os.getppid(), 9)\ntime.sleep(99)",
    "takes too much memory": "bytearray(10 * 2**30)",
    "gives no number": "return 'x'",
    "gives a large integer": "return 10**400",
    "gives a very large integer": "return 10**5000",
    "gives NaN": "return float('nan')",
    "gives a part that is infinite": "return {'score': 1, 'part': float('inf')}",
    "gives 20 MB": "return {'score': 1, **{f'{n:0100}': 1.0 for n in range(200_000)}}",
    "gives a mapping that raises": "return type('M', (dict,), {'items': lambda self: 1 / 0})(score=1)",
    "raises what cannot be shown": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})",
}


@pytest.mark.parametrize("act", ALL_SCORED)
def test_every_sample_gets_its_own_score(score, act):
    assert score(ALL_SCORED[act]) == RIGHT


@pytest.mark.parametrize("act", SECOND_FAILS)
def test_a_sample_that_fails_changes_no_other(score, act, capfd):
    lines = "\n    ".join(SECOND_FAILS[act].splitlines())
    assert score(f"if i == 2:\n    {lines}") == [1.0, None, 3.0, 4.0, 5.0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("end", ["pass", "os._exit(3)", "time.sleep(99)", "os.kill(os.getpid(), 11)"])
def test_a_daemon_of_a_function_ends_with_its_process(tmp_path, score, end):
    score(f"if i == 2:\n    {DAEMON.strip().replace(chr(10), chr(10) + '    ')}\n    {end}", timeout_s=2.0)
    assert marked() == []


def test_what_is_printed_is_cut_and_said(score, capfd):
    assert score("for _ in range(1000 * (i == 2)): print('x' * 1000)") == RIGHT
    shown = capfd.readouterr().err
    assert 60_000 < shown.count("x") < 70_000
    assert shown.count("printed 65536 bytes over one sample, the rest is not shown") == 1


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("sys.exit(3)", "running the file failed with SystemExit: 3"),
        ("raise KeyboardInterrupt", "loading it failed with KeyboardInterrupt"),
        ("os._exit(0)", "while it was loaded, it ended its process with exit code 0"),
        ("ctypes.string_at(0)", "while it was loaded, its process was ended by SIGSEGV"),
        ("os.write(4, b'{}')", "while it was loaded, it wrote to the connection that its scores go through"),
        ("score = dict", "must take data_source, .* does not say what it takes"),
    ],
)
def test_a_file_that_ends_what_loads_it_is_a_bad_file(tmp_path, act, said):
    (tmp_path / "mine.py").write_text(function_of("pass") + act)
    with pytest.raises(UserError, match=rf"reward\.function=.*mine\.py:score.*{said}"):
        scorer_of(tmp_path / "mine.py")
    assert [each for each in psutil.Process().children() if "worker_main" in " ".join(each.cmdline())] == []


def test_a_file_that_never_ends_is_given_up(tmp_path):
    (tmp_path / "mine.py").write_text("while True: pass")
    pool = WorkerPool([Source(f"{tmp_path}/mine.py:score")], load_timeout_s=1.0)
    with pytest.raises(UserError, match=r"mine\.py:score: loading it takes longer than 1 s"):
        asyncio.run(pool.load_first())


@pytest.mark.parametrize(
    "raised", ["SystemExit(0)", "KeyboardInterrupt", "RuntimeError('no')", "asyncio.CancelledError", "TimeoutError"]
)
def test_what_an_async_function_raises_fails_its_sample_alone(score, raised):
    assert score(f"if i == 2: raise {raised}", "async def") == [1.0, None, 3.0, 4.0, 5.0]


def test_a_failure_is_one_sentence_for_the_user(tmp_path):
    (tmp_path / "mine.py").write_text(function_of("return float('nan')"))
    with (
        scorer_of(tmp_path / "mine.py") as scorer,
        pytest.raises(UserError, match="must be a finite number, found nan"),
    ):
        scorer.score([reward_arguments("any", "text", "a" * 10**6, {"i": 1})])
