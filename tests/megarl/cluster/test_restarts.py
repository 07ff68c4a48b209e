"""Engines that die and are restarted: the engines echo, and die where a script says so."""

import os
import re
import signal
import time
from dataclasses import replace

import psutil
import pytest
from echo_engine import SLOW, TELLING, ask
from echo_kind import ECHO
from eventually import eventually, has_ended

import megarl.rollout
from megarl.cluster.workers.worker import Worker, WorkerGone
from megarl.data import Turn
from megarl.process.errors import MachinesUnfit, exit_code_of
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.run.checkpoints import checkpoints_folder
from megarl.run.resumption import machines_were_fit_with_a_checkpoint
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint import checkpoint_folder

pytestmark = pytest.mark.usefixtures("shared_cluster", "short_waits")


REQUESTS = [ask(prompt, samples=1 + prompt % 3) for prompt in range(8)]


def answered(engines):
    """The tokens of all requests, without the process that gave them; each is answered once."""
    answers = list(engines.generate_each(REQUESTS))
    assert sorted(place for place, _ in answers) == list(range(len(REQUESTS)))
    return [[turn.token_ids[:-1] for turn in turns] for _, turns in sorted(answers, key=lambda each: each[0])]


EXPECTED = [[[p, p + 100, sample] for sample in range(1 + p % 3)] for p in range(8)]


def states(engines):
    return [(handle.state, handle.version, handle.load) for handle in engines.handles]


@pytest.mark.long
def test_engines_that_die_come_back_and_nothing_is_lost_or_done_twice(open_group, script, capsys, tmp_path):
    """In one test, because processes take seconds to start."""
    (tmp_path / "script" / "leave").touch()
    with pytest.raises(WorkerGone) as caught, open_group(2, restarts=7) as run:
        lose_engines(*run, script, capsys, tmp_path / "script")
    # The first cause, with the log as it ended then.
    assert caught.value.sentence.startswith(
        "engines died more often than cluster.max_engine_restarts=7 allows, the last time: the process of engine_"
    )
    assert ": the first time, the process of engine_" in caught.value.sentence
    began = r"[-\d]+ [:\d]+ engine_\d is process \d+ on \S+"
    assert re.search(rf"\.log:\n{began}\nthe last words of an engine, generate$", caught.value.details)
    assert "the last words of an engine, start" in "".join(log.read_text() for log in tmp_path.glob("engine_?.log"))


def lose_engines(engines, refit, script, capsys, folder):
    (folder / "leave").unlink()
    children = [psutil.Process(int(file.stem)) for file in folder.glob("*.pid")]
    refit(0)
    check_a_death_in_a_rollout(engines, script, capsys)
    # Nothing is left of the dead engine, and all of the other.
    assert sorted(map(has_ended, children)) == [False, True]
    check_that_what_was_told_is_not_asked_again(engines)
    check_the_death_of_one_that_has_nothing_to_do(engines, script)
    check_a_death_in_a_refit(engines, refit, script)
    check_that_the_last_one_is_waited_for(engines, script)
    check_a_death_between_rollouts(engines, refit, script)
    script("generate")
    answered(engines)


def check_a_death_in_a_rollout(engines, script, capsys):
    before = engines.workers()
    script("generate")
    assert answered(engines) == EXPECTED
    said = capsys.readouterr().err
    assert "the process of engine_" in said
    assert " is started again (restart 1 of 7), and the others go on\n" in said
    assert " requests: they go on behind the 0 tokens there are\n" in said
    assert eventually(lambda: back(engines))
    (one,) = [handle for handle in engines.handles if handle.worker not in before]
    assert one.worker.log in [worker.log for worker in before]
    assert f"{one.name} serves again, " in capsys.readouterr().err
    metrics = engines.end_step()
    assert metrics["engines/seconds_down"] > 0
    assert 0 < metrics["throughput/engines_idle"] < 1
    assert (metrics["engines/running"], metrics["engines/waiting"]) == (1.5, 3)
    assert metrics["engines/tokens_preempted"] % 40 == 0
    assert metrics["engines/tokens_preempted"] > 0
    assert "engines/kv_used" not in metrics
    # Prompts of one token, of the requests that it left.
    assert 0 < metrics["engines/tokens_moved"] <= len(REQUESTS)
    after = engines.end_step()
    assert (after["engines/restarts"], after["engines/tokens_moved"]) == (1, 0)
    assert "engines/seconds_down" not in after


def back(engines):
    """Whether all serve; rollouts go on meanwhile."""
    assert answered(engines) == EXPECTED
    return all(handle.state == "serving" for handle in engines.handles)


def check_that_what_was_told_is_not_asked_again(engines):
    (((first, second),),) = [engines.generate([Request([TELLING], SamplingParameters(samples=2))])]
    assert first == Turn.of([TELLING], [1], [-9], [9], "stop")
    assert second == Turn.of([TELLING], [1, 2, 3, 4], [-1, -2, -3, -9], [1, 2, 3, 9], "stop")
    metrics = engines.end_step()
    assert (metrics["engines/restarts"], metrics["engines/tokens_moved"]) == (2, 4)
    assert eventually(lambda: back(engines))


def check_the_death_of_one_that_has_nothing_to_do(engines, script):
    script("version")
    engines.generate([ask(SLOW), ask(1)])
    # Heard of before the other has answered.
    assert engines.end_step()["engines/restarts"] == 3
    assert eventually(lambda: back(engines))


def check_a_death_in_a_refit(engines, refit, script):
    # The one that lives has the weights when the other is heard of, and is not asked to take them again.
    script("commit_update")
    metrics = refit(1)
    assert (metrics["refit/repeated"], metrics["refit/bytes"]) == (1, 0)
    assert eventually(lambda: back(engines))
    assert states(engines) == [("serving", 1, 0)] * 2


def check_that_the_last_one_is_waited_for(engines, script):
    # Also one of which the process is there, and the engine in it not.
    script("generate", suffix=".error")
    script("start", "generate")
    assert answered(engines) == EXPECTED
    assert eventually(lambda: back(engines))
    assert states(engines) == [("serving", 1, 0)] * 2
    metrics = engines.end_step()
    assert (metrics["engines/restarts"], metrics["engines/failed_starts"]) == (6, 1)


def check_a_death_between_rollouts(engines, refit, script):
    script("pause")
    engines.pause("keep")
    engines.resume()
    assert engines.end_step()["engines/restarts"] == 7
    assert refit(2)["refit/repeated"] == 0
    assert {version for state, version, _ in states(engines) if state == "serving"} == {2}


@pytest.mark.long
def test_engines_that_die_in_the_start_of_a_run_are_started_again(open_group, script, capsys):
    script("make", "start", "start")
    with open_group(2, restarts=3) as (engines, refit):
        assert states(engines) == [("starting", -1, 0)] * 2
        refit(0)
        assert answered(engines) == EXPECTED
    assert "(restart 3 of 3), and the others go on" in capsys.readouterr().err


@pytest.mark.long
def test_engines_that_stand_still_are_ended_and_their_requests_go_on(open_group, script, capsys, monkeypatch):
    monkeypatch.setattr("megarl.cluster.engines.restarts.HEARTBEAT_INTERVAL_S", 0.5)
    monkeypatch.setattr("megarl.cluster.workers.calls.HEARTBEAT_INTERVAL_S", 0.5)
    with open_group(2, restarts=3, silence_timeout_s=5) as (engines, refit):
        refit(0)
        # A process that is stopped while it is asked, and the one in its place while it starts.
        script("generate", "start", suffix=".stop")
        assert answered(engines) == EXPECTED
        assert eventually(lambda: back(engines), timeout_s=120)
        # One that lives, and ends none of its steps.
        script("version", suffix=".hang")
        assert eventually(lambda: answered(engines) == EXPECTED and engines.end_step()["engines/restarts"] == 2, 120)
        assert eventually(lambda: back(engines), timeout_s=120)
        # In a refit, the answer of the other is enough.
        script("commit_update", suffix=".stop")
        assert refit(1)["refit/repeated"] == 1
        assert answered(engines) == EXPECTED
    said = capsys.readouterr().err
    ended = r"engine_\d gave no sign of life for 5 s and was ended"
    for restart in range(1, 4):
        assert re.search(rf"{ended}; engine_\d is started again \(restart {restart} of", said), said
    assert re.search(rf"engine_\d did not come back \({ended}\); it is started once more", said), said
    assert said.count(" requests: they go on behind the 0 tokens there are\n") >= 1


@pytest.mark.long
def test_the_only_engine_that_hangs_in_its_start_is_ended_and_started_again(open_group, script, capsys):
    script("start", suffix=".hang")
    with open_group(1, restarts=2, engine_start_timeout_s=15) as (engines, refit):
        refit(0)
        script("generate")
        script("make", "start", suffix=".hang")
        assert answered(engines) == EXPECTED
        assert eventually(lambda: back(engines))
    said = capsys.readouterr().err
    assert "engine_0 gave no answer for 15 s; engine_0 is started again (restart 1 of 2)" in said
    for number in (2, 3):
        once_more = f"it is started once more in 0.1 s (try {number} of 8), and requests wait for it\n"
        assert f"engine_0 did not come back (engine_0 did not start within 15 s); {once_more}" in said


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_fails_in_its_start_or_with_its_first_weights_is_started_once_more(
    open_group, script, capsys, replicas
):
    with open_group(replicas, restarts=1) as (engines, refit):
        refit(0)
        script("generate")
        script("start", "start", suffix=".fault")
        # In mid-run weights are given to the new one alone.
        script("begin_update", suffix=".fault")
        assert answered(engines) == EXPECTED
        assert eventually(lambda: back(engines))
        assert states(engines) == [("serving", 0, 0)] * replicas
        metrics = engines.end_step()
        assert (metrics["engines/restarts"], metrics["engines/failed_starts"], metrics["engines/down"]) == (1, 3, 0)
        assert refit(1)["refit/repeated"] == 0
    said = capsys.readouterr().err
    assert (
        " did not come back (ValueError: too little memory is free); it is started once more in 0.1 s (try 4 " in said
    )


def test_an_engine_that_does_not_start_is_bad_input_only_where_none_has_started_before(
    open_group, script, tmp_path, monkeypatch
):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    config = MegarlConfig()
    config.output_dir = str(tmp_path / "run")

    def exit_code():
        script("start", suffix=".fault")
        says = r"^an engine did not start, check .* and its machine: .*too little memory is free"
        with (
            pytest.raises(MachinesUnfit, match=says) as caught,
            machines_were_fit_with_a_checkpoint(config),
            open_group(1, restarts=4),
        ):
            pass
        return exit_code_of(caught.value)

    assert exit_code() == 2
    checkpoint_folder.begin(checkpoints_folder(config), 20)
    checkpoint_folder.commit(checkpoints_folder(config), 20, {"step": 20}, keep=1)
    assert exit_code() == 1


@pytest.mark.long
def test_a_process_that_stands_still_before_its_engine_is_made_holds_nobody_up(open_group, script, monkeypatch):
    living = replace(ECHO, part_class=("echo_engine", "LivingPart"), part_arguments=lambda _number, _first: {})
    monkeypatch.setitem(megarl.rollout.ENGINES, "echo", living)
    stopped, begin_listen = [], Worker.begin_listen

    def stop_and_begin(worker):
        if not stopped:
            stopped.append(int(re.findall(r" is process (\d+) on ", worker.log.read_text())[-1]))
            os.kill(stopped[0], signal.SIGSTOP)
        return begin_listen(worker)

    with open_group(1, restarts=1, nodes=2, silence_timeout_s=20) as (engines, refit):
        refit(0)
        assert answered(engines) == EXPECTED
        monkeypatch.setattr(Worker, "begin_listen", stop_and_begin)
        engines.handles[0].parts[0].kill()
        assert eventually(lambda: stopped)
        # The thread that restarts it, and whoever else would go on with that.
        before_s = time.monotonic()
        assert not eventually(engines.recover, timeout_s=4)
        assert time.monotonic() < before_s + 16
        os.kill(stopped[0], signal.SIGCONT)
        assert eventually(lambda: back(engines))
