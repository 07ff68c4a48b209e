"""What the commands do with a folder that is finished, taken, or holds what a run reads; no process is started."""

import os

import pytest
import ray

from megarl.cli.main import main
from megarl.output.export import write_export
from megarl.output.lock import sole_writer
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import checkpoint_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arithmetic(tmp_path_factory.mktemp("data"), held_out=16)


@pytest.fixture
def commands(files, tmp_path, capfd):
    """`run(command)` gives the exit code and what is written to standard output and error."""
    model = write_tiny_model("qwen3_moe", tmp_path / "run" / "huggingface")
    recipes = {
        "train": ("quickstart", f"data.train_files=[{files.train}]", f"data.eval_files=[{files.eval}]"),
        "sft": ("quickstart_sft", f"sft.train_files=[{files.sft_train}]", f"sft.eval_files=[{files.sft_eval}]"),
        "dpo": ("quickstart_dpo", f"preference.train_files=[{files.pairs_train}]"),
        "reward-model": ("quickstart_reward_model", f"preference.train_files=[{files.pairs_train}]"),
        "spin": ("quickstart_spin", f"preference.train_files=[{files.sft_train}]"),
    }

    def run(command, *overrides):
        recipe, *given = recipes[command]
        arguments = [command, "--config-name", recipe, f"model.path={model}", *given, *overrides]
        code = main(arguments)
        assert not ray.is_initialized()
        return code, *capfd.readouterr()

    run.model = model
    return run


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "reward-model", "spin"])
def test_a_run_in_the_folder_of_its_own_model_is_refused(commands, command, tmp_path):
    before = {path: path.read_bytes() for path in commands.model.iterdir()}
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    code, _, errors = commands(command, f"output_dir={tmp_path / 'run'}")
    assert code == 2
    assert "write over its own input: model.path=" in errors.splitlines()[-1]
    assert {path: path.read_bytes() for path in commands.model.iterdir()} == before
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("command", ["train", "spin"])
def test_a_second_run_is_refused(commands, command, tmp_path):
    output = tmp_path / "other"
    with sole_writer(output):
        code, _, errors = commands(command, f"output_dir={output}")
    assert code == 2
    assert f"another run is writing {output} (process {os.getpid()} on " in errors.splitlines()[-1]


def test_a_second_quickstart_is_refused_and_removes_nothing(tmp_path, capfd):
    with sole_writer(tmp_path):
        (tmp_path / ".megarl-quickstart").touch()
        (tmp_path / "metrics.jsonl").write_text("mine")
        assert main(["quickstart", "--output-dir", str(tmp_path)]) == 2
    assert "another run is writing" in capfd.readouterr().err.splitlines()[-1]
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_an_export_without_the_run_that_wrote_it_is_not_replaced(commands, tmp_path):
    output = tmp_path / "other"
    (output / "huggingface").mkdir(parents=True)
    code, _, errors = commands("train", f"output_dir={output}")
    assert code == 2
    assert f"{output / 'huggingface'} is there, but no checkpoint" in errors.splitlines()[-1]


def test_a_finished_run_says_so_and_starts_nothing(commands, tmp_path):
    output = tmp_path / "other"
    root = output / "checkpoints"
    checkpoint_folder.begin(root, 7)
    checkpoint_folder.commit(root, 7, {"step": 7}, keep=1)
    write_export(lambda folder: folder.mkdir(), output / "huggingface", step=7)
    code, said, errors = commands("train", f"output_dir={output}", "loop.steps=7")
    assert code == 0
    first, *places = said.splitlines()
    assert first == "all 7 steps are done; raise loop.steps to go on from the last one"
    assert places == [f"model       {output / 'huggingface'}", f"checkpoint  {root / 'iter_0000007'}"]
    assert "starting" not in errors
