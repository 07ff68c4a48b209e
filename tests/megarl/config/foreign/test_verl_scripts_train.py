"""Scripts of verl, cut down to a tiny model, are translated and trained as they come out."""

import math
from pathlib import Path

import pytest
import verl_scripts

from megarl.cli.main import main
from megarl.config.compose import compose
from megarl.config.validate import validate
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.tracking import read_history
from megarl.train import train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_cluster")]

REWARDS = Path(__file__).parents[2] / "digits.py"


@pytest.mark.parametrize("name", verl_scripts.SCRIPTS)
def test_a_translated_script_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = write_arithmetic(tmp_path / "data", held_out=8)
    model = write_tiny_model("qwen3", tmp_path / "model")
    surroundings = {"MODEL_PATH": model, "TRAIN_FILE": files.train, "TEST_FILE": files.eval, "REWARD_FILE": REWARDS}
    for variable, path in surroundings.items():
        monkeypatch.setenv(variable, str(path))
    (tmp_path / "run.sh").write_text(verl_scripts.SCRIPTS[name])
    assert main(["config", "--from-verl", str(tmp_path / "run.sh")]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    config = compose("mine", [f"output_dir={tmp_path / 'run'}"], str(tmp_path))
    validate(config, "train")
    train(config)
    history = read_history(tmp_path / "run")
    assert [line["step"] for line in history if "reward/mean" in line] == [1, 2]
    learned = "value/loss" if name == "ppo" else "policy/loss"
    assert all(math.isfinite(line[learned]) for line in history if "reward/mean" in line)
