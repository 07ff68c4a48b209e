"""The file system of a folder, by what the kernel says of mounts; there is no NFS here."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from converters.errors import UserError
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.process import file_system


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder on NFS, below one that is not, with one in it that is not either."""
    mounts = tmp_path / "mounts"
    lines = (
        "overlay / overlay rw 0 0",
        f"tmpfs {tmp_path}/my\\040runs tmpfs rw 0 0",
        f"server:/runs {tmp_path}/my\\040runs nfs4 rw,vers=4.2 0 0",
        f"fast {tmp_path}/my\\040runs/fast lustre rw 0 0",
        f"10.0.0.1:/ {tmp_path}/my\\040runs/ceph ceph rw 0 0",
        f"juice {tmp_path}/my\\040runs/fuse fuse.juicefs rw 0 0",
        f"bucket {tmp_path}/my\\040runs/s3 fuse rw 0 0",
    )
    mounts.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    return tmp_path / "my runs"


def test_the_nearest_mount_says_the_type(runs):
    assert [
        file_system.type_of(each) for each in (runs, runs / "grpo/huggingface", runs / "fast/grpo", runs.parent)
    ] == [
        "nfs4",
        "nfs4",
        "lustre",
        "overlay",
    ]


def test_this_machine_has_a_type_for_each_folder(tmp_path):
    assert file_system.type_of(tmp_path)
    assert file_system.type_of(Path("/proc/self")) == "proc"


def ranks_on(*nodes: str) -> SimpleNamespace:
    called: list[tuple] = []
    seats = SimpleNamespace(nodes=[SimpleNamespace(id=node) for node in nodes])
    return SimpleNamespace(_seats=seats, call=lambda *words: called.append(words), called=called)


@pytest.mark.parametrize(
    ("folder", "kind"), [("", "nfs4"), ("ceph", "ceph"), ("fuse", r"fuse\.juicefs"), ("s3", "fuse")]
)
def test_an_export_that_machines_would_lose_parts_of_is_refused_before_a_byte_is_written(runs, folder, kind):
    group = ranks_on("a", "a", "b")
    for export in (
        lambda: TrainerGroup.export(group, runs / folder / "new", runs),
        lambda: TrainerGroup.export_adapter(group, runs / folder),
    ):
        with pytest.raises(
            UserError, match=rf"my runs.* of type {kind}, where 2 machines cannot .*megarl export --megatron"
        ):
            export()
    assert group.called == []


def test_what_other_machines_may_see_is_shared(runs):
    folders = (runs, runs / "fast", runs / "ceph", runs / "fuse", runs.parent)
    assert [file_system.is_shared(each) for each in folders] == [True, True, True, True, False]


@pytest.mark.parametrize(("nodes", "folder"), [(("a", "a"), "new"), (("a", "b"), "fast/new")])
def test_one_machine_writes_to_nfs_and_several_to_what_keeps_mappings_coherent(runs, nodes, folder):
    group = ranks_on(*nodes)
    TrainerGroup.export(group, runs / folder, runs)
    ((method, *arguments),) = group.called
    assert (method.__name__, *arguments) == ("export", runs / folder, runs)
