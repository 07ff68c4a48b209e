import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from outcomes import failures, values

from converters.errors import UserError
from megarl.rewards import RewardFailed, RewardLost, RewardTimedOut, Score, Scorer, reward_arguments
from megarl.rewards.scoring import LONGEST_SCORED_CHARACTERS
from megarl.rewards.worker import MOST_TRIES
from megarl.schema import RewardConfig, RewardTermConfig

ROOT = Path(__file__).parents[3]
FUNCTIONS = Path(__file__).parents[1] / "reward_functions.py"
MARK = f"child-of-a-reward-of-{os.getpid()}"
MINE = """
import asyncio, ctypes, os, re, subprocess, sys, time

def act(data_source, solution_str, ground_truth, extra_info):
    return eval(solution_str)

def forever():
    while True: pass

def arrive(folder, expected):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < expected:
        time.sleep(0.01)
    return 1

def deep():
    return deep()

def memory_hog():
    kept = []
    while True: kept.append(bytes(2**28))  # never touched: no memory is really taken

def family():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", "MARK"])

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(float(solution_str))
    return 1.0

met = asyncio.Barrier(20)

async def meet(data_source, solution_str, ground_truth, extra_info):
    await met.wait()
    return 1.0

async def blocks(data_source, solution_str, ground_truth, extra_info):
    time.sleep(2.0)
    return 1.0

def tokens(data_source, solution_str, ground_truth, extra_info, response_tokens):
    return response_tokens

def imports(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, **{name: float(name in sys.modules) for name in ("torch", "vllm", "ray", "transformers")}}

def descriptors(data_source, solution_str, ground_truth, extra_info):
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(link) for link in links if os.path.islink(link)]
    return {"score": 0, "inherited": sum("secret-of-the-parent" in kind for kind in kinds), "all": len(kinds)}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(MINE.replace("MARK", MARK))
    return file


def sample(solution, data_source="any", **more):
    return reward_arguments(data_source, solution, "7", {}, **more)


def scorer_of(file, name, **config):
    return Scorer(RewardConfig(function=f"{file}:{name}", **{"workers": 2, **config}))


def processes():
    """The processes that score for this one, by those that watch them."""
    watching = [
        child for child in psutil.Process().children() if any("worker_main" in word for word in child.cmdline())
    ]
    return {child.pid: [each.pid for each in child.children()] for child in watching}


HANGS = {
    "a catastrophic regex": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "an endless loop": "forever()",
    "a long sleep": "time.sleep(99)",
    "a computation in C": "len(str(9**(9**9)))",
}
DIES = {
    "sys.exit": ("sys.exit(0)", "it raised SystemExit: 0"),
    "os._exit": ("os._exit(3)", "it ended its process with exit code 3"),
    "a quiet os._exit": ("os._exit(0)", "it ended its process with exit code 0"),
    "a crash": ("ctypes.string_at(0)", "ended by SIGSEGV"),
    "a termination": ("os.kill(os.getpid(), 15)", "ended by SIGTERM"),
    "endless memory": ("memory_hog()", "it raised MemoryError"),
    "recursion": ("deep()", "it raised RecursionError"),
    "an exception": ("1 / 0", "it raised ZeroDivisionError: division by zero"),
    "an interrupt": ("(_ for _ in ()).throw(KeyboardInterrupt)", "it raised KeyboardInterrupt"),
    "no number": ("'text'", "'score' must be a finite number, found 'text'"),
    "nothing finite": ("float('nan')", "'score' must be a finite number, found nan"),
}


def test_what_hangs_is_ended_and_counted_and_the_others_are_scored(file):
    samples = [text for act in HANGS.values() for text in (act, "1.5")]
    with scorer_of(file, "act", timeout_s=2.0, on_timeout="drop") as scorer:
        scored = scorer.score([sample(text) for text in samples])
    assert values(scored) == [None, 1.5] * len(HANGS)
    assert failures(scored) == (0, len(HANGS))
    assert processes() == {}


def test_what_times_out_is_said_or_stops(file):
    with scorer_of(file, "act", timeout_s=1.5, on_timeout="zero") as scorer:
        scored = scorer.score([sample("forever()"), sample("1")])
    assert [type(each) for each in scored] == [RewardTimedOut, Score]
    said = r"(?s)longer than reward\.timeout_s.*on_timeout.*'forever\(\)'"
    with scorer_of(file, "act", timeout_s=1.5, on_timeout="stop") as scorer, pytest.raises(RewardTimedOut, match=said):
        scorer.score([sample("1"), sample("forever()")])


def test_what_ends_its_process_fails_with_the_manner_of_its_end_and_the_others_are_scored(file):
    with scorer_of(file, "act", workers=1) as scorer:
        for act, said in DIES.values():
            with pytest.raises(RewardFailed) as raised:
                scorer.score([sample("2.5"), sample(act)])
            assert said in raised.value.reason
    with scorer_of(file, "act", on_error="drop") as scorer:
        scored = scorer.score([sample(text) for text in ("1.5", "os._exit(3)", "2.5", "1 / 0")])
    assert values(scored) == [1.5, None, 2.5, None]
    assert failures(scored) == (2, 0)


@pytest.mark.parametrize("victim", ["the process that scores", "the one that watches it"])
def test_a_sample_whose_process_is_killed_is_scored_by_another(victim, file, tmp_path):
    pid = {"the process that scores": "os.getpid()", "the one that watches it": "os.getppid()"}[victim]
    tried = str(tmp_path / "tried")
    killed = f"(open({tried!r}, 'a').write('x'), len(open({tried!r}).read()) < 3 and (os.kill({pid}, 9), forever()))"
    with scorer_of(file, "act") as scorer:
        # As long as two kill it, it has a third; then it is left out, also where failures stop a run.
        scored = scorer.score([sample("1.5"), sample(f"{killed} and 2.5"), sample("os.kill(os.getpid(), 9)")])
    assert (tmp_path / "tried").read_text() == "x" * MOST_TRIES
    assert values(scored) == [1.5, 2.5, None]
    assert isinstance(scored[2], RewardLost)
    assert "SIGKILL, 3 times" in scored[2].reason
    assert processes() == {}


@pytest.mark.parametrize(("kills", "said"), [(MOST_TRIES - 1, None), (MOST_TRIES, "ended by SIGKILL, 3 times")])
def test_a_process_that_is_killed_while_it_loads_is_started_again(kills, said, tmp_path):
    path, tried = tmp_path / "reward.py", str(tmp_path / "tried")
    path.write_text(
        f"import os\nwith open({tried!r}, 'a') as tried:\n    tried.write('x')\n"
        f"if os.path.getsize({tried!r}) <= {kills}:\n    os.kill(os.getpid(), 9)\n"
        "def act(data_source, solution_str, ground_truth, extra_info):\n    return 1.5\n"
    )
    if said is None:
        with scorer_of(path, "act") as scorer:
            assert values(scorer.score([sample("")])) == [1.5]
    else:
        with pytest.raises(UserError, match=said), scorer_of(path, "act"):
            pass
    assert (tmp_path / "tried").read_text() == "x" * MOST_TRIES
    assert processes() == {}


def test_after_a_failure_no_further_sample_is_begun(file, tmp_path):
    samples = [sample("1 / 0")] + [sample(f"open({str(tmp_path / str(n))!r}, 'w').write('x')") for n in range(30)]
    with scorer_of(file, "act", workers=1) as scorer:
        with pytest.raises(RewardFailed, match="ZeroDivisionError"):
            scorer.score(samples)
        assert list(tmp_path.iterdir()) == []
        assert values(scorer.score([sample("2")])) == [2.0]


def test_processes_of_a_function_end_with_it(file):
    with scorer_of(file, "act", timeout_s=1.5, on_error="drop", workers=2) as scorer:
        scored = scorer.score([sample("family() or forever()"), sample("family() or os._exit(0)"), sample("1")])
    assert failures(scored) == (1, 1)
    assert not any(MARK in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def test_so_many_processes_score_at_once_and_no_more(file, tmp_path):
    with scorer_of(file, "act", workers=2, timeout_s=30.0) as scorer:
        scored = scorer.score([sample(f"arrive({str(tmp_path)!r}, 2)")] * 10)
        assert sorted([int(path.name)] for path in tmp_path.iterdir()) == sorted(processes().values())
        assert len(processes()) == 2
    assert values(scored) == [1.0] * 10
    assert processes() == {}


def test_the_processes_are_light_and_hold_nothing_of_the_parent(file, tmp_path):
    with (tmp_path / "secret-of-the-parent").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        with scorer_of(file, "descriptors") as scorer:
            (score,) = scorer.score([sample("")])
    assert score.parts["inherited"] == 0
    assert score.parts["all"] < 8
    with scorer_of(file, "imports") as scorer:
        (score,) = scorer.score([sample("")])
    assert score.parts == {"torch": 0.0, "vllm": 0.0, "ray": 0.0, "transformers": 0.0}


def test_the_processes_die_with_a_killed_parent(file, tmp_path):
    note = tmp_path / "pid"
    act = f"(open({str(note)!r}, 'w').write(str(os.getpid())), forever())"
    program = (
        "from megarl.rewards import *\nfrom megarl.schema import RewardConfig\n"
        f"scorer = Scorer(RewardConfig(function='{file}:act'))\n"
        f"scorer.score([reward_arguments('', {act!r}, '', {{}})])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert eventually(lambda: note.exists() and note.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not Path("/proc", note.read_text()).exists())


def test_async_functions_run_side_by_side(file):
    with scorer_of(file, "meet", workers=1, timeout_s=9.0, on_timeout="stop") as scorer:
        assert scorer.score([sample("")] * 20) == [Score(1.0, {}, {"score": 1.0})] * 20
        assert processes() == {}


def test_processes_and_event_loop_have_places_of_their_own(file):
    terms = {name: RewardTermConfig(f"{file}:{name}") for name in ("meet", "tokens")}
    with Scorer(RewardConfig(functions=terms, workers=1, timeout_s=9.0, on_timeout="stop")) as scorer:
        assert values(scorer.score([sample("", response_tokens=3)] * 20)) == [4.0] * 20
        assert len(processes()) == 1


def test_async_functions_time_out_also_if_they_block(file):
    with scorer_of(file, "later", timeout_s=1.5, on_timeout="drop") as scorer:
        scored = scorer.score([sample("99"), sample("0")])
    assert (values(scored), failures(scored)) == ([None, 1.0], (0, 1))
    with scorer_of(file, "blocks", timeout_s=0.3) as scorer:
        assert failures(scorer.score([sample("")])) == (0, 1)


def test_samples_are_scored_while_others_come(file):
    with scorer_of(file, "act") as scorer:
        pending = scorer.begin()
        pending.add({"first": sample("1")})
        assert eventually(lambda: pending._added[0].done())
        pending.add({"second": sample("2")})
        assert {key: each.value for key, each in pending.finish().items()} == {"first": 1.0, "second": 2.0}


def test_who_is_told_is_let_go_without_a_search_for_garbage(file, without_garbage_collection):
    is_told = threading.Event()

    class Told:
        def __init__(self, pending):
            self.pending = pending

        def __call__(self):
            self.pending.finish()
            is_told.set()

    with scorer_of(file, "later") as scorer:
        pending = scorer.begin()
        pending.add({number: sample("0.3") for number in range(3)})
        told = Told(pending)
        pending.when_finished(told)
        left = weakref.ref(told)
        del pending, told
        assert is_told.wait(30)
        assert eventually(lambda: left() is None)


def test_a_cancelled_batch_is_not_scored_and_the_next_one_is(file):
    with scorer_of(file, "act", workers=1) as scorer:
        pending = scorer.begin()
        pending.add({number: sample("forever()") for number in range(3)})
        pending.cancel()
        assert values(scorer.score([sample("2")])) == [2.0]


def test_a_long_response_is_scored_by_its_end():
    long = "a" * 200_000_000 + "z"
    with scorer_of(FUNCTIONS, "length") as scorer:
        (score,) = scorer.score([sample(long)])
    assert (score.value, score.parts["last"]) == (LONGEST_SCORED_CHARACTERS, ord("z"))


def test_a_function_that_asks_for_it_gets_the_length_in_tokens(file):
    with scorer_of(file, "tokens") as scorer:
        assert values(scorer.score([sample("text", response_tokens=5)])) == [5.0]


def test_a_scorer_that_is_closed_leaves_no_thread(file):
    before = threading.active_count()
    with scorer_of(file, "act") as scorer:
        scorer.score([sample("1")])
    assert threading.active_count() == before


def test_a_file_that_changed_for_the_worse_is_said(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef ends(data_source, solution_str, ground_truth, extra_info):\n    os._exit(3)\n")
    with scorer_of(file, "ends", on_error="drop", workers=1) as scorer:
        file.write_text("1 / 0")
        assert failures(scorer.score([sample("")])) == (1, 0)
        with pytest.raises(UserError, match=r"ends: running the file failed with ZeroDivisionError"):
            scorer.score([sample("")])
