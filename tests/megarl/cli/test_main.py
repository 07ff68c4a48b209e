"""The command: complete help, one sentence and exit code 2 for bad input, nothing heavy before it is needed."""

import errno
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from file_sizes import files_up_to
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.numpy import save_file

from converters.errors import UserError
from megarl.cli.main import COMMANDS, build_parser, main
from megarl.cli.training import TRAINING_COMMANDS
from megarl.process.errors import MachinesUnfit, RunFailed

HEAVY = ("torch", "ray", "hydra", "transformers", "vllm", "megatron.core")
TRAINING = tuple(TRAINING_COMMANDS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model, with (odd) characters"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_and_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  megarl {command}" in text
    for flag in ("--config-name", "--config-dir", "--print-config") if command in TRAINING else ():
        assert flag in text


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from megarl.cli.main import build_parser; build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"megarl.cli.main", "megarl.cli.training"} <= set(done.stdout.split())
    assert not set(HEAVY) & set(done.stdout.split())


def test_a_wrong_key_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    code = f"""import sys
from megarl.cli.main import main
code = main(["train", "--config-name", "quickstart", "model.path=m", "loop.stps=1"])
print(code, *(name for name in {HEAVY!r} if name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["2", "hydra"]
    *started, sentence = done.stderr.splitlines()
    assert sentence == "megarl: configuration key loop.stps does not exist; did you mean loop.steps?"
    assert [line.split(" .")[0].strip() for line in started] == ["reading the configuration"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train --config-name nowhere", "there is no recipe nowhere"),
        ("train --config-name quickstart", "leaves model.path open"),
        ("train --config-name quickstart model.path=m --tensor-model-paralel-size 2", "--tensor-model-parallel-size?"),
        ("train --config-name quickstart model.path=m --global-batch-size 2", "here it is loop.prompts_per_step"),
        ("train --config-name quickstart model.path=m --learning-rate 1e-6", "here it is --lr"),
        ("train --config-name quickstart model.path=m --n-samples-per-prompt 8", "here it is loop.samples_per_prompt"),
        ("train --config-name quickstart model.path=m --lr-warmup-iters 8", "here it is --lr-warmup-steps"),
        (
            "train --config-name quickstart model.path=m --torch-fsdp2-no-reshard-after-forward",
            "give the weights that they gathered back",
        ),
        (
            "train --config-name quickstart model.path=m --use-checkpoint-args",
            "with config.json in any case: leave it out",
        ),
        ("train --config-name quickstart model.path=m --trainer-ranks 2", "give it as cluster.trainer_ranks=..."),
        ("train --config-name quickstart model.path=m", "model.path=m is not a HuggingFace folder"),
        ("sft --config-name quickstart_sft model.path=m --lr", "--lr needs a value"),
        ("dpo --config-name quickstart_dpo model.path=m", "model.path=m is not a HuggingFace folder"),
        ("reward-model --config-name quickstart_dpo preference.stps=1", "did you mean preference.steps?"),
        ("spin --config-name quickstart_spin model.path=m --lr", "--lr needs a value"),
        ("eval --model m --files e.parquet loop.stps=1", "did you mean loop.steps?"),
        ("eval --model m --files e.parquet", "--model=m is not a HuggingFace folder"),
        ("trane --config-name quickstart", "there is no command trane; did you mean train?"),
        ("fly", "there is no command fly; megarl --help lists them"),
        ("eval --model m --files e.parquet --samples 0", "--samples 0 is too small: it must be at least 1"),
        ("eval --model m --files e.parquet --max-response-tokens 0", "--max-response-tokens 0 is too small"),
        ("eval --model m --files e.parquet --temperature 0.5", "--model=m is not a HuggingFace folder"),
        ("eval --model m --files e.parquet --temperature -1", "--temperature -1 must be a number above 0"),
        ("eval --model m --files e.parquet --temperature nan", "--temperature nan must be a number above 0"),
        ("", "megarl needs COMMAND; see megarl --help"),
        ("doctor --jsn", "megarl doctor has no option --jsn; did you mean --json?"),
        ("doctor --folder x", "megarl doctor has no option --folder; did you mean --folders?"),
        ("convert --hf m --out o --tpp 2", "megarl convert has no option --tpp; did you mean --tp?"),
        ("quickstart --lr 3", "megarl quickstart has no option --lr; see megarl quickstart --help"),
        ("quickstart steps=3", "megarl quickstart does not take steps=3; see megarl quickstart --help"),
        ("eval --model m --files e.parquet --sampls 3", "megarl eval has no option --sampls; did you mean --samples?"),
        ("chat --model m --lr 3", "megarl chat has no option --lr; see megarl chat --help"),
        ("train --config-name quickstart model.path=m --print-confg", "; did you mean --print-config?"),
        ("plan --model qwen3_8b --gpu 8", "megarl plan has no option --gpu; did you mean --gpus?"),
        ("plan --config-name grpo_qwen3_moe --gpu 8", "such an option; did you mean --gpus?"),
        ("plan --model qwen3_8b --lr 1", "megarl plan takes --lr only with a recipe: give --config-name, too"),
        ("plan --model qwen3_8b --gpus abc", "--gpus takes a whole number, not 'abc'"),
        (
            "convert --hf m --out o --tensor-model-parallel-size x",
            "--tensor-model-parallel-size takes a whole number, not 'x'",
        ),
        ("eval --model m --files e.parquet --temperature x", "--temperature takes a number, not 'x'"),
        ("convert --hf m --out", "--out needs a value"),
        ("eval --model m --files", "--files needs at least one value"),
        ("config --diff a", "--diff needs 2 values"),
        ("config --diff a b --config-name c", "--config-name cannot be given beside --diff"),
        ("config", "megarl config needs one of --config-name, --diff, --from-verl, --from-slime; see megarl config "),
        ("config --config-nam x", "megarl config has no option --config-nam; did you mean --config-name?"),
        ("train --confg-name X", "megarl train has no option --confg-name; did you mean --config-name?"),
        ("train --lr 1", "megarl train needs --config-name; see megarl train --help"),
        ("convert --dry-run", "megarl convert needs --hf, --out; see megarl convert --help"),
        ("inspect", "megarl inspect needs DIR; see megarl inspect --help"),
        ("convert --hf m --out o --dtype bf61", "--dtype bf61 is none of keep, bf16, fp32; did you mean bf16?"),
        ("convert --hf m --out o --json=4", "--json takes no value, and '4' was given"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *started, sentence = captured.err.splitlines()
    assert sentence.startswith("megarl: ")
    assert says in sentence
    assert all(line.startswith("reading the configuration") for line in started)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["chat"], ["eval", "--files", "e.parquet"]])
def test_a_megatron_checkpoint_as_a_model_is_refused_with_the_way_on(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").touch()
    assert main([*words, "--model", str(tmp_path)]) == 2
    assert f"megarl export --megatron {tmp_path} --out DIR makes one of it" in capsys.readouterr().err


def test_flags_and_overrides_end_as_the_same_configuration(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    start = ["train", "--config-name", "quickstart", "--print-config", f"model.path='{model}'"]
    assert main([*start, "--lr", "1e-5", "--sequence-parallel", "loop.steps=3", "--recompute-modules", "mlp"]) == 0
    flags = capsys.readouterr().out
    overrides = ["megatron.lr=1e-5", "megatron.sequence_parallel=true", "megatron.recompute_modules=[mlp]"]
    assert main([*start, "loop.steps=3", *overrides]) == 0
    assert flags == capsys.readouterr().out
    assert "  sequence_parallel: true\n" in flags
    assert OmegaConf.create(flags).model.path == str(model)


def test_what_is_printed_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--config-name", "grpo_deepseek_v3", "model.path=m", "output_dir=o", "--print-config"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(first)
    assert main(["train", "--config-name", "again", "--config-dir", str(tmp_path), "--print-config"]) == 0
    assert capsys.readouterr().out == first


def test_eval_takes_odd_paths_and_overrides(model: Path) -> None:
    from megarl.cli.eval import overrides_of
    from megarl.config.compose import compose

    file = str(model / "it's, data.parquet")
    words = ["eval", "--model", str(model), "--reward", "my rewards.py:score", "--files", file, "b.parquet"]
    options, options.overrides = build_parser().parse_known_args([*words, "loop.seed=4"])
    config = compose("eval", overrides_of(options))
    assert config.model.path == str(model)
    assert config.data.eval_files == [file, "b.parquet"]
    assert config.reward.function == "my rewards.py:score"
    assert (config.loop.seed, config.output_dir) == (4, "runs/eval")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_what_the_parser_asks_for(command: str) -> None:
    module = TRAINING_COMMANDS.get(command) or importlib.import_module(f"megarl.cli.{command}")
    assert callable(module.run)
    assert isinstance(module.TAKES_OVERRIDES, bool)


def fill_a_folder(_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device", "runs/step_3")


def fill_by_safetensors(_: object) -> int:
    """Meets a limit of the size of files as safetensors meets a full disk."""
    with files_up_to(2**16), tempfile.TemporaryDirectory() as folder:
        save_file({"weight": np.zeros(2**17, np.uint8)}, Path(folder) / "model.safetensors")
    return 0


@pytest.mark.parametrize(
    ("fill", "place"), [(fill_a_folder, "runs/step_3"), (fill_by_safetensors, "the output folder")]
)
def test_a_full_disk_is_one_sentence(fill, place, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megarl.cli.doctor.run", fill)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == f"megarl: the disk is full at {place}: make room, then run again\n"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "runs"),
        SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"),
        ValueError("No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_not_swallowed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("megarl.cli.doctor.run", fail)
    with pytest.raises(type(error)):
        main(["doctor"])


class Ended(RunFailed):
    sentence = "engine_0 died:\n  run it again"
    details = "The end of engine_0.log:\n  Killed"


@pytest.mark.parametrize(
    ("error", "code"), [(Ended(), 1), (UserError("engine_0 died: run it again", Ended.details), 2)]
)
def test_what_ends_a_run_is_one_sentence_with_its_details_below(error, code, monkeypatch, capsys) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("megarl.cli.doctor.run", fail)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == f"megarl: engine_0 died: run it again\n{Ended.details}\n"


@pytest.mark.parametrize("restarts", [None, "0", "1"])
@pytest.mark.parametrize("kind", [UserError, MachinesUnfit])
def test_machines_that_a_requeued_job_had_before_do_not_end_it(kind, restarts, monkeypatch, capsys) -> None:
    def fail(*_: object) -> int:
        raise kind("n2: its clock is 90.0 s behind the others; let ntpd set it")

    monkeypatch.setattr("megarl.cli.doctor.run", fail)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert main(["doctor"]) == (1 if kind is MachinesUnfit and restarts == "1" else 2)
    assert capsys.readouterr().err == "megarl: n2: its clock is 90.0 s behind the others; let ntpd set it\n"


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--help", ""), ("--help", "1"), ("train --config-name quickstart model.path=m --print-config", "")],
)
@pytest.mark.parametrize(
    ("output", "reason"), [("a closed pipe", "Broken pipe"), ("/dev/full", "No space left on device")]
)
def test_output_that_nobody_takes_is_one_sentence(words: str, unbuffered: str, output: str, reason: str) -> None:
    if output == "/dev/full":
        descriptor = os.open(output, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    command = [sys.executable, "-m", "megarl.cli.main", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(descriptor)
    said = f"megarl: the output was not taken any more ({reason}): what is above is not all\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("closed", [">&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_none_that_a_later_file_becomes(closed: str) -> None:
    command = "main(['config', '--diff', 'quickstart', 'quickstart'])"
    code = f"import os; from megarl.cli.main import main; assert not {command}; assert os.open('/', 0) > 2"
    arguments = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("errors", ["a closed pipe", "/dev/full"])
def test_a_sentence_that_nobody_takes_leaves_its_exit_code(errors: str) -> None:
    if errors == "/dev/full":
        descriptor = os.open(errors, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    command = [sys.executable, "-m", "megarl.cli.main", "trian"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=descriptor, check=False)
    os.close(descriptor)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("words", [["doctor"], ["config", "--config-name", "quickstart", "model.path=m"]])
def test_a_current_folder_that_is_gone_is_one_sentence(words, tmp_path, monkeypatch, capsys) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    said = "megarl: the current folder is not there any more (No such file or directory): change to one that is, "
    assert capsys.readouterr().err == f"{said}and run again\n"


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    # An nvidia-smi that never answers keeps the doctor waiting, so that the signal meets it at work.
    started = tmp_path / "started"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ntouch {started}\nexec sleep 100\n")
    program.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl.cli.main", "doctor"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not started.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "megarl: interrupted\n"
        assert process.returncode == 130
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda each: int(each)
)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CPU dispatcher tracer already initlized"),
        UserError("it cannot be read"),
        Ended(),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_a_signal_ends_in_is_the_interruption(number, code, error, monkeypatch, capsys) -> None:
    # Under nohup it is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def meet(*_: object) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise error from None
        return 0

    monkeypatch.setattr("megarl.cli.doctor.run", meet)
    try:
        assert main(["doctor"]) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capsys.readouterr().err == "megarl: interrupted\n"
