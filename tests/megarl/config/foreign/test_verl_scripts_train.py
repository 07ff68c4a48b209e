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
from megarl.schema import MegarlConfig
from megarl.tracking import read_history
from megarl.train import train

REWARDS = Path(__file__).parents[2] / "digits.py"


@pytest.fixture(params=verl_scripts.SCRIPTS)
def config(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> MegarlConfig:
    """The configuration of a script whose surroundings are there."""
    files = write_arithmetic(tmp_path / "data", held_out=8)
    model = write_tiny_model("qwen3", tmp_path / "model", fields={"num_hidden_layers": 4})
    surroundings = {"MODEL_PATH": model, "TRAIN_FILE": files.train, "TEST_FILE": files.eval, "REWARD_FILE": REWARDS}
    for variable, path in surroundings.items():
        monkeypatch.setenv(variable, str(path))
    (tmp_path / "run.sh").write_text(verl_scripts.SCRIPTS[request.param])
    assert main(["config", "--from-verl", str(tmp_path / "run.sh")]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    return compose("mine", [f"output_dir={tmp_path / 'run'}"], str(tmp_path))


def test_a_translated_script_passes_every_check(config: MegarlConfig) -> None:
    validate(config, "train")
    assert config.data.train_files
    assert config.reward.function == f"{REWARDS}:begins_with_a_digit"


@pytest.mark.long
@pytest.mark.usefixtures("shared_cluster")
def test_a_translated_script_trains(config: MegarlConfig) -> None:
    train(config)
    history = [line for line in read_history(Path(config.output_dir)) if "reward/mean" in line]
    assert [line["step"] for line in history] == [1, 2]
    learned = "value/loss" if config.algorithm.advantage == "gae" else "policy/loss"
    assert all(math.isfinite(line[learned]) for line in history)
