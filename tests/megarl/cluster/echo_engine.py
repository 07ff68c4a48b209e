"""An engine without a model: it answers with the prompt, the seed, the sample and its own process.

Nothing of megarl is imported, since it would bring torch, which costs more than all else that a process does here.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Condition
from types import SimpleNamespace

DEADLY = 666
"""A prompt that begins with this token ends the process."""
SLOW = 777
"""One that begins with this token takes a while, and longer where another engine is to die meanwhile."""
RELUCTANT = 555
"""One that begins with this token is not taken in at once."""
TELLING = 888
"""One that begins with this token is a `Request`: the engine tells of some tokens and dies, or goes on behind those."""
SCRIPT = "MEGARL_TEST_DEATHS"
"""The environment variable that names a folder. A file in it, called as one of the moments below, is an engine's death
there: the first engine that comes by takes it away and ends, at once or late; or stands still as a process, or in what
it does, or fails there and lives. One called as below is the trainer's memory, beside which no engine may start."""
TAKEN = "taken"


def leave_a_child():
    """Begin one that outlives this process, if the script says so, and write its number down."""
    folder = Path(os.environ.get(SCRIPT, os.devnull))
    if (folder / "leave").exists():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (folder / f"{child.pid}.pid").touch()


def check_that_the_trainer_has_nothing():
    """Where an engine takes its memory."""
    assert not (Path(os.environ.get(SCRIPT, os.devnull)) / TAKEN).exists(), "the trainer has the memory"


def pass_by(moment):
    """End here if the script says so."""
    for death in taken(moment):
        print(f"the last words of an engine, {moment}", flush=True)
        if death.suffix == ".error":
            from megarl.rollout.protocol import EngineDiedError

            raise EngineDiedError("the echo died away")
        if death.suffix == ".fault":
            raise ValueError("too little memory is free")
        if death.suffix == ".late":
            # Time for the news to be heard.
            time.sleep(2)
        if death.suffix == ".stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if death.suffix in (".stop", ".hang"):
            time.sleep(3600)
        os._exit(7)


def will_another_die():
    """Wait for a death that is to come of a question whether an engine lives, which is heard of a while later."""
    folder, is_to_come = Path(os.environ.get(SCRIPT, os.devnull)), False
    while any(folder.glob("version.*.death")):
        is_to_come = True
        time.sleep(0.05)
    return is_to_come


def taken(moment):
    for line in sorted(Path(os.environ.get(SCRIPT, os.devnull)).glob(f"{moment}.*")):
        with suppress(FileNotFoundError):
            line.unlink()
            yield line


class EchoEngine:
    def __init__(self, model_path, arguments):
        pass_by("make")
        self._version = arguments.get("version", 0)
        self._has_parts = "number" in arguments
        self._is_fenced = False
        self._changed = Condition()
        self._asked = SimpleQueue()
        self._aborted = set()
        self._taking = 0
        self._is_slow = False
        self._away = set()

    def start(self):
        check_that_the_trainer_has_nothing()
        pass_by("start")
        leave_a_child()
        if self._has_parts:
            time.sleep(3600)

    def version(self):
        if not self._is_slow:
            pass_by("version")
        return self._version

    def worker_parts(self):
        return [0, 0]

    def start_profiler(self):
        self._recorded = {"worker 0": b'{"name": "echo"}'}

    def stop_profiler(self, most_events, since_us):
        return self._recorded

    def load(self):
        return SimpleNamespace(running=1.5, waiting=3, kv_used=None, preempted=40)

    def submit(self, requests):
        assert not self._away, "it sleeps"
        with self._changed:
            self._taking += 1
        if any(request.prompt_token_ids[0] == RELUCTANT for request in requests.values()):
            time.sleep(1)
        for number, request in requests.items():
            self._asked.put((number, request))
        with self._changed:
            self._taking -= 1

    def sleep(self):
        if self._taking:
            raise RuntimeError("it was put to sleep while it was asked")
        pass_by("sleep")
        self._away = {"kv_cache", "weights"}

    def wake_up(self, parts):
        pass_by("wake_up")
        with self._changed:
            self._away -= set(parts)
            self._changed.notify_all()

    def events(self, engines):
        while (asked := self._asked.get()) is not None:
            number, request = asked
            if number in self._aborted:
                continue
            # It may be put to sleep between `submit` and here.
            with self._changed:
                assert self._changed.wait_for(lambda: not self._away, timeout=250)
            if request.prompt_token_ids[0] == DEADLY:
                os._exit(7)
            if request.prompt_token_ids[0] == TELLING:
                yield from tell(number, request)
                continue
            if request.prompt_token_ids[0] == SLOW:
                self._is_slow = True
                time.sleep(10 if will_another_die() else 2.5)
                self._is_slow = False
            with self._changed:
                assert self._changed.wait_for(lambda: not self._is_fenced, timeout=250)
                version = self._version
            answer = [echo(request, sample, version) for sample in range(request.sampling.samples)]
            yield [SimpleNamespace(number=number, answer=answer)]
            pass_by("generate")

    def abort(self, numbers):
        for _ in taken("abort"):
            raise ZeroDivisionError("the echo goes on")
        self._aborted.update(numbers)

    def generate_stream(self, request):
        yield request.prompt_token_ids

    def begin_update(self, version, names):
        assert names == ["weight"]
        if version <= self._version:
            raise ValueError("it has this version")
        assert "weights" not in self._away, "it sleeps"
        pass_by("begin_update")
        self._is_fenced = True

    def map_segments(self, segments, segment_bytes):
        pass_by("map_segments")

    def write(self, bucket):
        pass_by("write")

    def pause(self, mode):
        pass_by("pause")

    def resume(self):
        pass

    def commit_update(self, version, kv):
        pass_by("commit_update")
        with self._changed:
            self._version, self._is_fenced = version, False
            self._changed.notify_all()
        return 0

    def close(self):
        self._asked.put(None)


class EchoPart:
    """A process of an engine on another machine, which ends while the first waits for it."""

    def __init__(self, model_path, arguments):
        assert arguments["number"] == 1

    def start(self):
        os._exit(7)


class LivingPart:
    """A process of an engine on another machine, which does nothing and stays."""

    def __init__(self, model_path, arguments):
        pass

    def start(self):
        pass

    def close(self):
        pass


def tell(number, request):
    """News of the second sample, and death; or an answer that goes on behind what was told."""
    import numpy as np

    from megarl.data import Turn
    from megarl.rollout.protocol import Progress, RequestEnded

    if not request.begun:
        tokens = np.array([1, 2, 3], np.int32)
        one = np.ones(1, np.int32)
        yield [Progress(one * number, one, one * 3, tokens, -tokens.astype(np.float32), tokens)]
        # Time for the news to be heard.
        time.sleep(5)
        os._exit(7)
    prompts = [request.prompt_of(sample) for sample in range(2)]
    yield [RequestEnded(number, [Turn.of(prompt, [len(prompt)], [-9], [9], "stop") for prompt in prompts])]


def ask(prompt, samples=1, priority=0, conversation=None):
    """A request, as far as an echo goes."""
    sampling = SimpleNamespace(samples=samples, seed=prompt + 100)
    about = {"priority": priority, "conversation": conversation}
    return SimpleNamespace(prompt_token_ids=[prompt], sampling=sampling, **about)


def echo(request, sample, version):
    tokens = [*request.prompt_token_ids, request.sampling.seed, sample, os.getpid()]
    return SimpleNamespace(token_ids=tokens, versions=[version] * len(tokens), finish_reason="stop")
