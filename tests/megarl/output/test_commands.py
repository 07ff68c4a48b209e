"""Commands on a folder that is finished, taken, or holds what a run reads; no process is started."""

import os

import pytest
import ray

from megarl.cli.main import main
from megarl.output.export import write_export
from megarl.output.lock import sole_writer
from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.checkpoint import checkpoint_folder


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
        had_ray = ray.is_initialized()
        code = main(arguments)
        assert ray.is_initialized() == had_ray
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
    output = finished(tmp_path / "other", {"step": 7, "command": "train"})
    code, said, errors = commands("train", f"output_dir={output}", "loop.steps=7")
    assert code == 0
    first, *places = said.splitlines()
    assert first == "all 7 steps are done; raise loop.steps to go on from the last one"
    checkpoint = output / "checkpoints" / "iter_0000007"
    assert places == [f"model       {output / 'huggingface'}", f"checkpoint  {checkpoint}"]
    assert "starting" not in errors


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"has_converged": False}, "all 7 steps are done; raise sft.steps to go on from the last one"),
        ({"has_converged": True}, "converged after 7 steps; choose another output_dir to start a new run"),
    ],
)
def test_a_finished_run_on_examples_says_why(commands, tmp_path, state, says):
    output = finished(tmp_path / "other", {"step": 7, "command": "sft", **state})
    code, said, errors = commands("sft", f"output_dir={output}", "sft.steps=7")
    assert (code, said.splitlines()[0]) == (0, says)
    assert "starting" not in errors


@pytest.mark.parametrize(
    ("writer", "command", "steps"),
    [("sft", "train", "loop.steps=7"), ("sft", "train", "loop.steps=8"), ("train", "sft", "sft.steps=7")],
)
def test_no_command_goes_on_from_a_checkpoint_of_another(commands, tmp_path, writer, command, steps):
    output = finished(tmp_path / "other", {"step": 7, "command": writer})
    code, _, errors = commands(command, f"output_dir={output}", steps)
    assert code == 2
    assert f"is a checkpoint of megarl {writer}, from which megarl {command} cannot go on" in errors.splitlines()[-1]


def finished(output, state):
    """The folder of a run of 7 steps that is at its end."""
    root = output / "checkpoints"
    checkpoint_folder.begin(root, 7)
    checkpoint_folder.commit(root, 7, state, keep=1)
    write_export(lambda folder: folder.mkdir(), output / "huggingface", step=7)
    return output
