import importlib.util

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from converters.errors import UserError
from megarl.tracking import LOGGERS, Run


def scalars(folder, name):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_was_logged(tmp_path):
    logger = LOGGERS["tensorboard"](Run(tmp_path, 0, 2))
    logger.log(0, {"eval/accuracy": 0.25})
    logger.log(1, {"eval/accuracy": 0.5, "policy/entropy": 1.5})
    assert scalars(tmp_path, "policy/entropy") == [(1, 1.5)], "written before the logger is closed"
    logger.close()
    assert scalars(tmp_path, "eval/accuracy") == [(0, 0.25), (1, 0.5)]


def test_tensorboard_hides_the_void_steps_of_a_resumed_run(tmp_path):
    killed = LOGGERS["tensorboard"](Run(tmp_path, 0, 9))
    for step in range(4):
        killed.log(step, {"reward/mean": step})
    killed.close()
    resumed = LOGGERS["tensorboard"](Run(tmp_path, 2, 9, resumed=True))
    resumed.log(2, {"reward/mean": 0.5})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(0, 0.0), (1, 1.0), (2, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed_names_its_extra(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=rf"'{name}', which is not installed; .*'megarl\[{name}\]'"):
        LOGGERS[name](Run(tmp_path, 0, 1))
