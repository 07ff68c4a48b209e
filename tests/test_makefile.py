"""The commands that `make` would run."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTALLS_SGLANG = "--target .venv-sglang.partial"
ANEW = ("--what-if", "constraints/sglang.txt")


def planned(*arguments: str) -> list[str]:
    """The commands of a target. Raises TimeoutExpired where `make` calls itself without an end."""
    command = ["make", "--dry-run", *arguments]
    # The tests may run under a make, whose options are not those of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment.pop("MFLAGS", None)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as make:
        try:
            commands = make.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            os.killpg(make.pid, signal.SIGKILL)
            raise
    assert make.returncode == 0
    return commands.splitlines()


@pytest.mark.parametrize(
    "target", [["setup", "SGLANG=1"], ["quickstart", "ENGINE=sglang"], ["test-sglang"]], ids=" ".join
)
def test_sglang_is_installed_once_after_the_environment(target):
    commands = planned(*ANEW, *target)
    (place,) = [i for i, command in enumerate(commands) if INSTALLS_SGLANG in command]
    assert ["tools/setup_environment.py" in command for command in commands[:place]] == [True] + [False] * (place - 1)
    assert not any("tools/setup_environment.py" in command for command in commands[place:])


@pytest.fixture
def make_sglang(tmp_path):
    """Runs a `make` in another folder, whose Python writes down what it is told; gives that."""
    (tmp_path / "constraints").mkdir()
    for name in ("sglang.txt", "sglang_cuda.txt"):
        (tmp_path / "constraints" / name).touch()

    def program(path, lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)

    def make(variant, glibc="2.34"):
        told = tmp_path / "told"
        told.touch()
        places = (
            '[ "$2" != venv ] || { mkdir -p $3/bin; cp $0 $3/bin/python; }; mkdir -p .venv-sglang.partial\n'
            '[ ! -d .venv-sglang.partial/bin ] || echo "#!$PWD/$0" > .venv-sglang.partial/bin/program'
        )
        program(tmp_path / ".venv" / "bin" / "python", f'echo "$0 $*" >> {told}\n{places}')
        (tmp_path / ".venv" / "megarl-setup.json").write_text(f'{{\n "variant": "{variant}"\n}}')
        program(tmp_path / "bin" / "getconf", f'[ "$1" != GNU_LIBC_VERSION ] || echo "glibc {glibc}"')
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
        command = ["make", "--file", ROOT / "Makefile", "--old-file", "environment", ".venv-sglang"]
        made = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        return made, told.read_text().splitlines()

    return make


@pytest.mark.parametrize(
    ("variant", "program", "lock"),
    [
        ("cpu", "--target .venv-sglang.partial", "sglang.txt"),
        ("cuda", ".venv-sglang.partial/bin/python", "sglang_cuda.txt"),
    ],
)
def test_on_cuda_sglang_has_an_environment_of_its_own(tmp_path, make_sglang, variant, program, lock):
    made, told = make_sglang(variant)
    assert made.returncode == 0
    assert program in told[-1]
    assert told[-1].endswith(f"--requirement constraints/{lock}")
    assert (tmp_path / ".venv-sglang").is_dir()


def test_programs_of_sglangs_environment_name_the_python_that_is_there(tmp_path, make_sglang):
    make_sglang("cuda")
    programs = tmp_path / ".venv-sglang" / "bin"
    assert (programs / "program").read_text() == f"#!{programs / 'python'}\n"


@pytest.mark.parametrize("glibc", ["2.4", "2.28", "2.33"])
def test_where_sglang_has_no_wheels_pip_is_not_asked(tmp_path, make_sglang, glibc):
    (tmp_path / ".venv-sglang").mkdir()
    os.utime(tmp_path / ".venv-sglang", (0, 0))
    made, told = make_sglang("cuda", glibc)
    assert "SGLang has no wheels for a glibc below 2.34" in made.stderr
    assert told == []
    assert (tmp_path / ".venv-sglang").is_dir()


@pytest.mark.parametrize("target", ["setup", "quickstart", "test"])
def test_who_does_not_ask_for_sglang_gets_none(target):
    commands = planned(*ANEW, target)
    assert any("tools/setup_environment.py" in command for command in commands)
    assert not any(INSTALLS_SGLANG in command for command in commands)


@pytest.mark.parametrize("value", ["/tmp/sp a", 'it\'s, (odd) & $$HOME; "x"', "~/runs"])
@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("MODEL", "--model"),
        ("ENGINE", "--engine"),
        ("WEIGHTS", "--weights"),
        ("SCHEDULE", "--schedule"),
        ("STEPS", "--steps"),
        ("OUTPUT", "--output-dir"),
    ],
)
def test_what_is_given_to_the_quickstart_reaches_it_as_one_word(variable, option, value):
    commands = "\n".join(planned("quickstart", f"{variable}={value}")).replace("\\\n", "")
    (command,) = [line for line in commands.splitlines() if " megarl.cli.main quickstart " in line]
    words = shlex.split(command)
    assert words[words.index(option) + 1] == value.replace("$$", "$")
    assert len(words) == (6 if variable == "MODEL" else 8)


BENCHMARKS = re.findall(r"^(benchmark(?!-setup)[a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", sorted(set(BENCHMARKS)))
def test_a_benchmark_gets_its_arguments(target):
    (script,) = [command for command in planned(*ANEW, target, "ARGS=--an-option") if " benchmarks/" in command]
    assert shlex.split(script)[-1] == "--an-option"
