import importlib
import importlib.util
import sys
import threading
import time
from importlib.metadata import version

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from converters.errors import UserError
from megarl.process.errors import exit_code_of
from megarl.tracking import LOGGERS, Histogram, Run, open_tracker, read_history, services

# Stand-ins for services that need an account or a server: they keep what they are told, as the real ones' clients do.
WANDB = """
import os, types
runs, groups, configs = {}, [], []
def setup():
    mode, group = (os.environ.get(f"WANDB_{name}") for name in ("MODE", "RUN_GROUP"))
    return types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode or "online", run_group=group))
class Histogram:
    MAX_LENGTH = 512
    def __init__(self, np_histogram):
        self.counts, self.edges = np_histogram
        if len(self.counts) > self.MAX_LENGTH:
            raise ValueError("The maximum length of a histogram is %i" % self.MAX_LENGTH)
        if len(self.counts) + 1 != len(self.edges):
            raise ValueError("len(bins) must be len(histogram) + 1")
class Run:
    def __init__(self, id): self.id, self.lines, self.axis, self.exit_codes = id, [], {}, []
    def define_metric(self, name, step_metric): self.axis[name] = step_metric
    def log(self, line): self.lines.append(line)
    def finish(self, exit_code): self.exit_codes.append(exit_code)
def init(*, project, name, group, dir, config, id, resume):
    assert (id is None) == (resume is None) and resume in (None, "must")
    groups.append(group)
    configs.append(config)
    id = id or f"run{len(runs)}"
    return runs.setdefault(id, Run(id))
"""
MLFLOW = """
import types
runs, active, experiments, states = {}, [], [], {}
def set_experiment(name): experiments.append(name)
def start_run(run_id, run_name):
    run_id = run_id or f"run{len(runs)}"
    runs.setdefault(run_id, [])
    active.append(run_id)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))
def log_metrics(metrics, step):
    assert all(c.isalnum() or c in "_-./ " for name in metrics for c in name)
    assert all(type(value) is float for value in metrics.values())
    runs[active[-1]].append((step, metrics))
def end_run(status): states[active.pop()] = status
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put the stand-in for a service where Python finds it; returns it."""

    def install(name, source):
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.delitem(sys.modules, name, raising=False)
        service = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, service)
        return service

    return install


def log_once(name, run, step):
    logger = LOGGERS[name].make(run)
    logger.log(step, {"reward/mean": 0.5})
    logger.close()


def scalars(folder, name):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_logged(tmp_path):
    logger = LOGGERS["tensorboard"].make(Run(tmp_path, 0, 2))
    logger.log(0, {"eval/accuracy": 0.25})
    logger.log(1, {"eval/accuracy": 0.5, "policy/entropy": 1.5})
    assert scalars(tmp_path, "policy/entropy") == [(1, 1.5)], "written before the logger is closed"
    logger.close()
    assert scalars(tmp_path, "eval/accuracy") == [(0, 0.25), (1, 0.5)]


def test_a_start_that_fails_leaves_no_event_file_for_the_next_to_keep(tmp_path):
    for _ in range(2):
        LOGGERS["tensorboard"].make(Run(tmp_path, 0, 2)).close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_hides_the_void_steps_of_a_resumed_run(tmp_path):
    killed = LOGGERS["tensorboard"].make(Run(tmp_path, 0, 9))
    for step in range(4):
        killed.log(step, {"reward/mean": step})
    killed.close()
    resumed = LOGGERS["tensorboard"].make(Run(tmp_path, 2, 9, resumed=True))
    resumed.log(2, {"reward/mean": 0.5})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(0, 0.0), (1, 1.0), (2, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed_is_installed_with_the_versions_that_are_there(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    stack = "cpu" if version("torch").endswith("+cpu") else "cuda"
    with pytest.raises(UserError, match=rf"with pip install --constraint constraints/{stack}\.txt '{name}.*>=\d"):
        LOGGERS[name].make(Run(tmp_path, 0, 1))


def test_a_resumed_run_goes_on_with_its_wandb_run(tmp_path, installed):
    wandb = installed("wandb", WANDB)
    log_once("wandb", Run(tmp_path, 0, 9), step=0)
    log_once("wandb", Run(tmp_path, 1, 9, resumed=True), step=1)
    log_once("wandb", Run(tmp_path, 0, 9), step=0)
    assert {name: [line["step"] for line in run.lines] for name, run in wandb.runs.items()} == {
        "run0": [0, 1],
        "run1": [0],
    }
    assert all(run.axis == {"*": "step"} and not any(run.exit_codes) for run in wandb.runs.values())
    assert wandb.runs["run1"].lines == [{"reward/mean": 0.5, "step": 0}]


def test_wandb_is_shown_the_configuration_without_its_secrets(tmp_path, installed):
    wandb = installed("wandb", WANDB)
    environment = {"HF_TOKEN": "hf_1", "JUDGE_API_KEY": "sk-2", "AWS_SECRET_ACCESS_KEY": "3", "NCCL_DEBUG": "INFO"}
    options = {"password": "4", "api-key": "sk-5", "answer_key": "answer", "max_tokens": 8, "pad_token": "", 3: "x"}
    config = {"cluster": {"environment": environment}, "reward": {"functions": [{"options": options}]}}
    LOGGERS["wandb"].make(Run(tmp_path, 0, 9, config=config)).close()
    hidden = dict.fromkeys(["HF_TOKEN", "JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY"], "hidden")
    of_reward = {**options, "password": "hidden", "api-key": "hidden"}
    assert wandb.configs == [
        {"cluster": {"environment": environment | hidden}, "reward": {"functions": [{"options": of_reward}]}}
    ]
    assert environment["HF_TOKEN"] == "hf_1"


def test_each_start_offline_is_a_wandb_run_of_its_own_in_one_group(tmp_path, installed, monkeypatch):
    wandb = installed("wandb", WANDB)
    starts = [("offline", None), ("offline", None), ("online", None), ("dryrun", "mine"), ("online", "mine")]
    for step, (mode, group) in enumerate(starts):
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_RUN_GROUP", group or "")
        log_once("wandb", Run(tmp_path, step, 9, run_name="sums", resumed=step > 0), step)
    steps = {name: [line["step"] for line in run.lines] for name, run in wandb.runs.items()}
    assert steps == {"run0": [0], "run1": [1], "run2": [2, 4], "run3": [3]}
    assert wandb.groups == ["sums", "sums", None, "mine", "mine"]


def test_a_resumed_run_goes_on_with_its_mlflow_run(tmp_path, installed):
    mlflow = installed("mlflow", MLFLOW)
    log_once("mlflow", Run(tmp_path, 0, 9, project="sums"), step=0)
    log_once("mlflow", Run(tmp_path, 1, 9, project="sums", resumed=True), step=1)
    log_once("mlflow", Run(tmp_path, 0, 9, project="sums"), step=0)
    values = {"reward/mean": 0.5}
    assert mlflow.runs == {"run0": [(0, values), (1, values)], "run1": [(0, values)]}
    assert (mlflow.active, set(mlflow.experiments)) == ([], {"sums"})


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_services_are_told_that_a_run_has_failed_and_that_it_has_ended_well_at_last(tmp_path, installed, error):
    wandb, mlflow = installed("wandb", WANDB), installed("mlflow", MLFLOW)
    with pytest.raises(error), open_tracker(["wandb", "mlflow"], Run(tmp_path, 0, 9)):
        raise error
    assert (wandb.runs["run0"].exit_codes, mlflow.states) == ([1], {"run0": "FAILED"})
    with open_tracker(["wandb", "mlflow"], Run(tmp_path, 1, 9, resumed=True)):
        pass
    assert (wandb.runs["run0"].exit_codes, mlflow.states) == ([1, 0], {"run0": "FINISHED"})


def test_a_service_is_told_that_the_run_fails_where_another_logger_cannot_start(tmp_path, installed):
    wandb = installed("wandb", WANDB)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        open_tracker(["wandb", "jsonl"], Run(tmp_path, 0, 9, resumed=True))
    assert wandb.runs["run0"].exit_codes == [1]


def test_a_service_that_is_away_for_a_while_ends_no_run(tmp_path, installed, monkeypatch, capsys):
    mlflow = installed("mlflow", MLFLOW)
    log_metrics = mlflow.log_metrics

    def unreachable(*_, **__):
        raise ConnectionError("Max retries exceeded\nwith url: /api/2.0/mlflow")

    def away_at_first(metrics, step):
        (unreachable if step == 1 else log_metrics)(metrics, step)

    monkeypatch.setattr(mlflow, "log_metrics", away_at_first)
    monkeypatch.setattr(mlflow, "end_run", unreachable)
    with open_tracker(["jsonl", "mlflow"], Run(tmp_path, 0, 2)) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.5})
    assert [line["step"] for line in read_history(tmp_path)] == [0, 1, 2]
    assert [step for step, _ in mlflow.runs["run0"]] == [0, 2]
    why = "(ConnectionError: Max retries exceeded with url: /api/2.0/mlflow); the run goes on"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: mlflow does not take the metrics of step 1 {why}",
        f"warning: mlflow does not take the end of the run {why}",
    ]


def test_no_step_waits_for_a_service_that_does_not_answer(tmp_path, installed, monkeypatch, capsys):
    mlflow = installed("mlflow", MLFLOW)
    answers = threading.Event()
    monkeypatch.setattr(mlflow, "log_metrics", lambda *_, **__: answers.wait(60))
    monkeypatch.setattr(services, "_CLOSE_WAIT_S", 0.1)
    logger = LOGGERS["mlflow"].make(Run(tmp_path, 0, 300))
    start = time.monotonic()
    for step in range(300):
        logger.log(step, {"reward/mean": 0.5})
    logger.close()
    answers.set()
    assert time.monotonic() - start < 30
    lost, late = capsys.readouterr().err.splitlines()
    assert "mlflow is 100 steps behind: metrics from step 10" in lost
    assert "mlflow has not taken all metrics" in late


def test_all_that_waits_is_taken_before_the_end(tmp_path, installed, monkeypatch):
    mlflow = installed("mlflow", MLFLOW)
    log_metrics = mlflow.log_metrics

    def slowly(metrics, step):
        time.sleep(0.01)
        log_metrics(metrics, step)

    monkeypatch.setattr(mlflow, "log_metrics", slowly)
    logger = LOGGERS["mlflow"].make(Run(tmp_path, 0, 9))
    for step in range(30):
        logger.log(step, {"reward/mean": 0.5})
    logger.close()
    assert [step for step, _ in mlflow.runs["run0"]] == list(range(30))


def test_a_service_that_is_away_at_the_start_ends_a_new_run_and_no_resumed_one(
    tmp_path, installed, monkeypatch, capsys
):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    mlflow = installed("mlflow", MLFLOW)

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(mlflow, "start_run", unreachable)
    says = r"^mlflow does not take the run \(ConnectionError: no route\): see to MLFLOW_TRACKING_URI, or take it off"
    with pytest.raises(UserError, match=says) as caught:
        LOGGERS["mlflow"].make(Run(tmp_path, 0, 9))
    assert exit_code_of(caught.value) == 2
    log_once("mlflow", Run(tmp_path, 1, 9, resumed=True), step=1)
    said = "warning: mlflow cannot be reached (ConnectionError: no route); the run goes on without it\n"
    assert capsys.readouterr().err == said


def test_no_start_waits_for_a_service_that_does_not_answer(tmp_path, installed, monkeypatch, capsys):
    mlflow = installed("mlflow", MLFLOW)
    answers, start = threading.Event(), time.monotonic()
    monkeypatch.setattr(mlflow, "set_experiment", lambda _: answers.wait(60))
    monkeypatch.setattr(services, "_START_WAIT_S", 0.1)
    log_once("mlflow", Run(tmp_path, 1, 9, resumed=True), step=1)
    with pytest.raises(UserError, match=r"^mlflow does not take the run \(TimeoutError: no answer in 0 s\): see to"):
        LOGGERS["mlflow"].make(Run(tmp_path, 0, 9))
    answers.set()
    assert time.monotonic() - start < 30
    said = "warning: mlflow cannot be reached (TimeoutError: no answer in 0 s); the run goes on without it\n"
    assert capsys.readouterr().err == said


def test_a_machine_without_internet_is_told_how_wandb_does_without(tmp_path, installed, monkeypatch):
    def unreachable(**_):
        raise TimeoutError("Run initialization has timed out after 90.0 sec.\nPlease try again")

    monkeypatch.setattr(installed("wandb", WANDB), "init", unreachable)
    with pytest.raises(
        UserError, match=r"after 90\.0 sec\. Please try again\): set WANDB_MODE=offline, or take it off"
    ):
        LOGGERS["wandb"].make(Run(tmp_path, 0, 9))


LENGTHS = Histogram(edges=(0.5, 2.5, 4.5), counts=(3, 1))


def test_tensorboard_draws_the_bins_it_was_given(tmp_path):
    logger = LOGGERS["tensorboard"].make(Run(tmp_path, 0, 9))
    logger.log(4, {"response_length/histogram": LENGTHS, "reward/mean": 0.5})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Histograms("response_length/histogram")
    drawn = event.histogram_value
    assert (event.step, drawn.min, drawn.max, drawn.num) == (4, 0.5, 4.5, 4)
    assert (list(drawn.bucket_limit), list(drawn.bucket)) == ([2.5, 4.5], [3, 1])
    assert (drawn.sum, drawn.sum_squares) == (3 * 1.5 + 3.5, 3 * 1.5**2 + 3.5**2)
    assert scalars(tmp_path, "reward/mean") == [(4, 0.5)]


def test_wandb_gets_a_histogram_of_its_own(tmp_path, installed):
    wandb = installed("wandb", WANDB)
    logger = LOGGERS["wandb"].make(Run(tmp_path, 0, 9))
    logger.log(4, {"response_length/histogram": LENGTHS, "reward/mean": 0.5})
    logger.close()
    (line,) = wandb.runs["run0"].lines
    drawn = line.pop("response_length/histogram")
    assert (drawn.counts, drawn.edges) == ([3, 1], [0.5, 2.5, 4.5])
    assert line == {"reward/mean": 0.5, "step": 4}


def test_wandb_gets_the_load_of_more_experts_than_it_takes_bins(tmp_path, installed):
    wandb = installed("wandb", WANDB)
    load = Histogram(tuple(expert - 0.5 for expert in range(601)), tuple(range(600)))
    logger = LOGGERS["wandb"].make(Run(tmp_path, 0, 9))
    logger.log(4, {"experts/load/layer_3": load})
    logger.close()
    (line,) = wandb.runs["run0"].lines
    drawn = line["experts/load/layer_3"]
    assert drawn.counts == [2 * (2 * pair) + 1 for pair in range(300)]
    assert drawn.edges == [2 * pair - 0.5 for pair in range(301)]


def test_mlflow_gets_quantiles_and_names_that_it_takes(tmp_path, installed):
    mlflow = installed("mlflow", MLFLOW)
    logger = LOGGERS["mlflow"].make(Run(tmp_path, 0, 9))
    logger.log(4, {"a/histogram": LENGTHS, "reward/source/my@data": 0.5, "none": Histogram((0.0, 1.0), (0,))})
    logger.close()
    quantiles = {"p10": 0.5 + 2 * 0.4 / 3, "p50": 0.5 + 2 * 2 / 3, "p90": 2.5 + 2 * 0.6}
    ((step, values),) = mlflow.runs["run0"]
    assert step == 4
    assert values == pytest.approx(
        {f"a/histogram/{name}": value for name, value in quantiles.items()} | {"reward/source/my_data": 0.5}
    )


def test_curves_of_a_run_that_is_not_continued_are_kept_apart(tmp_path):
    for step in (3, 5):
        log_once("tensorboard", Run(tmp_path, first_step=0, last_step=9), step)
    assert [step for step, _ in scalars(tmp_path, "reward/mean")] == [5]
    events = EventAccumulator(str(tmp_path / "tensorboard.1")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [3]
