"""Runs that fail go on by themselves, and end where that does not help."""

import signal
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.cli.main import main
from megarl.cluster.ray.runtime import RayNotStarted
from megarl.cluster.workers.worker import WorkerFailed, WorkerGone
from megarl.data.stretches import ValuesGone
from megarl.process.errors import MachinesUnfit, MayPass, exit_code_of
from megarl.process.ports import free_port
from megarl.process.signals import asked_to_stop, interruption
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.run.checkpoints import checkpoints_folder
from megarl.run.resumption import MOST_IN_VAIN, TooManyFailures, run_with_restarts
from megarl.schema import MegarlConfig
from megatron_ext.checkpoint import checkpoint_folder


@pytest.fixture
def config(tmp_path: Path) -> MegarlConfig:
    made = MegarlConfig()
    made.output_dir, made.cluster.max_restarts = str(tmp_path / "run"), 4
    made.checkpoint.resume = "never"
    return made


class Program:
    """Each try saves the checkpoint of a step, if there is one, and then fails, if there is something."""

    def __init__(self, *tries: tuple[int | None, BaseException | None]) -> None:
        self.resumes: list[str] = []
        self._tries = iter(tries)

    def __call__(self, config: MegarlConfig) -> None:
        self.resumes.append(config.checkpoint.resume)
        step, failure = next(self._tries)
        if step is not None:
            root = checkpoints_folder(config)
            checkpoint_folder.begin(root, step)
            checkpoint_folder.commit(root, step, {"step": step}, keep=1)
        if failure is not None:
            raise failure

    @property
    def is_over(self) -> bool:
        return next(self._tries, None) is None


def gone(rank: int, folder: Path) -> WorkerGone:
    log = folder / f"trainer_{rank}.log"
    log.write_text(f"the last words of rank {rank}\n")
    return WorkerGone(f"the process of trainer_{rank} died", "see to it", log)


def test_a_run_goes_on_from_its_last_checkpoint_and_is_told_so(config, tmp_path, capsys):
    program = Program((None, gone(0, tmp_path)), (20, RayNotStarted()), (40, gone(1, tmp_path)), (60, None))
    run_with_restarts(program, config)
    assert program.is_over
    # The checkpoints that it finds after a failure are its own.
    assert program.resumes == ["never", "auto", "auto", "auto"]
    said = [line[9:] for line in capsys.readouterr().err.splitlines()]
    log = tmp_path / "trainer_1.log"
    assert said[0] == "the process of trainer_0 died; the run has no checkpoint and starts over (restart 1 of 4)"
    assert said[3].startswith(
        "Ray's processes were not up after its 30 seconds; the run goes on from the checkpoint of"
    )
    assert said[5] == "the process of trainer_1 died; the run goes on from the checkpoint of step 40 (restart 3 of 4)"
    assert said[6:] == [f"The end of {log}:"[9:], "the last words of rank 1"[9:]]


def test_values_that_went_with_a_process_are_such_a_failure(config, capsys):
    program = Program((20, ValuesGone("lost")), (40, None))
    run_with_restarts(program, config)
    assert program.is_over
    said = capsys.readouterr().err
    assert "values of this step with it; the run goes on from the checkpoint of step 20 (restart 1 of 4)" in said


def test_the_first_cause_stands_in_the_end_of_a_run_that_fails_too_often(config, tmp_path):
    program = Program(*((step, gone(step, tmp_path)) for step in range(1, 6)))
    with pytest.raises(TooManyFailures) as caught:
        run_with_restarts(program, config)
    assert program.is_over
    assert caught.value.sentence == (
        "the run failed more often than cluster.max_restarts=4 allows, the last time: the process of trainer_5 died; "
        "the first time: the process of trainer_1 died"
    )
    assert caught.value.details.endswith("the last words of rank 1")


@pytest.mark.parametrize("saved_first", [None, 7])
def test_failures_in_a_row_without_a_checkpoint_between_end_a_run_with_the_last(saved_first, config, tmp_path):
    tries = [(saved_first if number == 0 else None, gone(number, tmp_path)) for number in range(MOST_IN_VAIN)]
    program = Program(*tries)
    with pytest.raises(
        TooManyFailures, match=rf"failed {MOST_IN_VAIN} times in a row .*: the process of trainer_2 died: "
    ):
        run_with_restarts(program, config)
    assert program.is_over


def test_a_checkpoint_between_failures_is_progress(config, tmp_path):
    config.cluster.max_restarts = 10
    saves: Sequence[int | None] = (None, None, 5, None, 10, None, None)
    program = Program(*((step, gone(number, tmp_path)) for number, step in enumerate(saves)))
    with pytest.raises(TooManyFailures, match="in a row"):
        run_with_restarts(program, config)
    assert program.is_over


@pytest.mark.parametrize(
    "failure",
    [lambda folder: UserError("no such data"), lambda folder: KeyboardInterrupt(), lambda folder: ZeroDivisionError()],
)
def test_what_does_not_pass_ends_a_run_at_once(failure: Callable[[Path], BaseException], config, tmp_path):
    program, error = Program((None, failure(tmp_path))), type(failure(tmp_path))
    with pytest.raises(error):
        run_with_restarts(program, config)


def test_without_restarts_the_first_failure_ends_a_run_as_it_is(config, tmp_path):
    config.cluster.max_restarts, failure = 0, gone(0, tmp_path)
    with pytest.raises(WorkerGone) as caught:
        run_with_restarts(Program((20, failure)), config)
    assert caught.value is failure


def test_a_fault_in_a_rank_may_pass_and_flies_where_it_does_not(config, tmp_path):
    failures = [WorkerFailed(f"RuntimeError: NCCL error {number}", tmp_path / "log") for number in range(MOST_IN_VAIN)]
    run_with_restarts(Program((20, failures[0]), (40, None)), config)
    with pytest.raises(WorkerFailed, match="NCCL error 2") as caught:
        run_with_restarts(Program(*((None, failure) for failure in failures)), config)
    assert caught.value.__notes__[0].startswith(f"the run failed {MOST_IN_VAIN} times in a row")


def test_a_run_that_was_told_to_end_is_not_begun_again(config, tmp_path):
    def program(_: MegarlConfig) -> None:
        with asked_to_stop(waits=True) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop
            raise gone(0, tmp_path)

    with interruption(), pytest.raises(WorkerGone):
        run_with_restarts(program, config)


def test_nothing_of_a_failed_try_is_held_by_the_next(config, tmp_path):
    class Held:
        pass

    held: list[weakref.ref] = []
    left: list[Held | None] = []

    def program(_: MegarlConfig) -> None:
        if held:
            left.append(held[0]())
            return
        mine = Held()
        mine.itself = mine  # as what holds a run does: a circle
        held.append(weakref.ref(mine))
        raise gone(0, tmp_path)

    run_with_restarts(program, config)
    assert left == [None]


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        MachinesUnfit("after 1800 s the Ray cluster has 2 of cluster.nodes=3 machines"),
        MayPass("wandb does not take the run"),
    ],
)
def test_a_machine_or_a_service_that_is_not_there_after_a_failure_may_come_back(
    error, failures, config, tmp_path, monkeypatch
):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    tries = [(None, gone(0, tmp_path))] * failures
    program = Program(*tries, (None, error))
    with pytest.raises(MayPass) as caught:
        run_with_restarts(program, config)
    assert program.is_over
    assert exit_code_of(caught.value) == (1 if failures else 2)


def test_a_run_with_a_checkpoint_had_fit_machines_before(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    model, files = write_tiny_model("qwen3_moe", tmp_path / "model"), write_arithmetic(tmp_path / "data", held_out=16)
    root = tmp_path / "run" / "checkpoints"
    words = ["train", "--config-name", "quickstart", f"output_dir={root.parent}", f"model.path={model}"]
    words += [f"data.train_files=[{files.train}]", f"data.eval_files=[{files.eval}]"]
    words += [f"cluster.address=127.0.0.1:{free_port()}"]
    assert main(words) == 2
    checkpoint_folder.begin(root, 20)
    assert main(words) == 2
    checkpoint_folder.commit(root, 20, {"step": 20}, keep=1)
    assert main(words) == 1
    assert capsys.readouterr().err.count("megarl: nothing listens at cluster.address=127.0.0.1:") == 3
