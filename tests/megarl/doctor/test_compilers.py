"""Whether a machine has the compilers that kernels take, where the libraries look for them."""

import sysconfig

import pytest

from megarl.doctor.compilers import compilers_here
from megarl.doctor.inventory import take_inventory
from megarl.doctor.node_probe import NodeProbe


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine("gcc", "Python.h")` has these alone; the folder that it is in."""
    programs, headers = tmp_path / "bin", tmp_path / "include"
    programs.mkdir()
    headers.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(headers)})
    for name in ("CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)

    def have(*names):
        for name in names:
            file = (headers if name.endswith(".h") else programs) / name
            file.touch(mode=0o755)
        return tmp_path

    return have


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_compiler_and_the_header_are_enough(compiler, machine):
    machine(compiler, "Python.h")
    assert compilers_here().lacking == ()


def test_what_is_not_there_is_named(machine, monkeypatch):
    folder = machine("g++")
    assert compilers_here().lacking == ("C compiler (gcc or clang)", str(folder / "include/Python.h"))
    machine("gcc", "Python.h")
    monkeypatch.setenv("CC", "icx")
    assert compilers_here().lacking == ("C compiler icx (CC)",)


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_the_folder_that_is_named_is_the_one_that_counts(name, machine, monkeypatch):
    folder = machine("nvcc")
    assert compilers_here().has_nvcc
    monkeypatch.setenv(name, str(folder))
    assert compilers_here().has_nvcc
    monkeypatch.setenv(name, str(folder / "other"))
    assert not compilers_here().has_nvcc


def test_a_machine_and_a_node_are_asked_for_theirs(monkeypatch):
    monkeypatch.setenv("CC", "icx")
    lacking = ("C compiler icx (CC)",)
    assert take_inventory().compilers.lacking == lacking
    assert NodeProbe("127.0.0.1").look(is_free=False, gpus=0).compilers.lacking == lacking
