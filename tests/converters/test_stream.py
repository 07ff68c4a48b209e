"""Conversions that are interrupted, continued, damaged in between, or run out of disk."""

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import (
    MODELS,
    content_of,
    convert,
    everything_in,
    export,
    make,
    random_numbers,
    random_tensors,
    write_model,
)
from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes

TP2_PP2 = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("source") / "hf", "glm4_moe", draw=random_numbers)


@pytest.fixture(scope="module")
def megatron(source, tmp_path_factory):
    convert(source, folder := tmp_path_factory.mktemp("megatron") / "megatron", TP2_PP2)
    return folder


def converted(source: Path, out: Path, **options) -> None:
    convert(source, out, TP2_PP2, **options)


def exported(source: Path, out: Path, **options) -> None:
    export(source, out, shard_size_bytes=3000, **options)


def exported_fp8(source: Path, out: Path, **options) -> None:
    export(source, out, shard_size_bytes=3000, fp8=True, **options)


Work = Callable[..., None]
WORKS: dict[str, Work] = {"convert": converted, "export": exported, "export in FP8": exported_fp8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def tmp_path(place):
    """The same folder in every test, empty.

    A checkpoint says where its tokenizer is, so only conversions to the same folder write the same bytes.
    """
    yield place
    shutil.rmtree(place)
    place.mkdir()


@pytest.fixture(params=WORKS, scope="module")
def work(request, source, megatron, place):
    """A conversion, and all the files that it writes to tmp_path / "out" when nothing happens."""
    function, origin = WORKS[request.param], source if request.param == "convert" else megatron
    function(origin, place / "out")
    expected = everything_in(place / "out")
    shutil.rmtree(place / "out")
    return lambda out, **options: function(origin, out, **options), expected


def interrupt_after(share: float):
    """Progress that ends the run as Ctrl-C does, in the middle of the writing."""

    def progress(done: int, total: int) -> None:
        if done >= share * total:
            raise KeyboardInterrupt

    return progress


def noted(partial: Path) -> list[list]:
    return [json.loads(line) for line in (partial / ".journal").read_text().splitlines()[1:]]


def interrupted(work: Work, out: Path, share: float = 0.5, **options) -> list[list]:
    """Interrupt a run; returns the tensors that it noted."""
    with pytest.raises(KeyboardInterrupt):
        work(out, progress=interrupt_after(share), **options)
    assert not out.exists()
    return noted(out.with_name("out.partial"))


@pytest.fixture
def listens_to_sigint():
    """As Python does, unless it was started where the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_sigint")
def test_a_signal_ends_a_run_and_it_is_continued(work, tmp_path):
    run, expected = work
    sent = []

    def progress(done: int, total: int) -> None:
        if done >= total // 2 and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # as a slow disk

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", workers=2, progress=progress)
    assert not (tmp_path / "out").exists()
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_an_interrupted_run_is_continued_to_the_same_bytes(work, workers, share, tmp_path):
    run, expected = work
    names = {name for name, *_ in interrupted(run, tmp_path / "out", share, workers=workers)}
    assert bool(names) == (share > 0)
    run(tmp_path / "out", workers=4 - workers)
    assert everything_in(tmp_path / "out") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_interrupted_again_and_again_gets_on(work, tmp_path):
    run, expected = work
    counts = [len(interrupted(run, tmp_path / "out", share)) for share in (0.2, 0.4, 0.6, 0.8)]
    assert counts == sorted(set(counts))
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


def test_what_was_written_is_read_and_not_written_again(work, tmp_path):
    run, _ = work
    before = interrupted(run, tmp_path / "out")
    partial = tmp_path / "out.partial"
    inside = {(file, offset): (nbytes, value) for _, *places in before for file, offset, nbytes, value in places}
    (file, offset), (nbytes, _) = max(inside.items(), key=lambda item: item[1])
    # A file that has another content and its right checksum noted is taken for what the interrupted run wrote.
    other = bytes(nbytes)
    with (partial / file).open("r+b") as opened:
        opened.seek(offset)
        opened.write(other)
    journal = (partial / ".journal").read_text()
    old, new = (json.dumps([file, offset, nbytes, value]) for value in (inside[file, offset][1], crc32(other)))
    assert journal.count(old) == 1
    (partial / ".journal").write_text(journal.replace(old, new))
    run(tmp_path / "out")
    assert (tmp_path / "out" / file).read_bytes()[offset : offset + nbytes] == other


DAMAGES = {
    "a bit of the elements": lambda content, offset, nbytes: flipped(content, offset + nbytes // 2),
    "the byte before them": lambda content, offset, _: flipped(content, offset - 1),
    "the byte behind them": lambda content, offset, nbytes: flipped(content, min(offset + nbytes, len(content) - 1)),
    "the beginning of the file": lambda content, _, __: flipped(content, 0),
    "all of it is zeros": lambda content, _, __: bytes(len(content)),
    "its end is gone": lambda content, offset, nbytes: content[: offset + nbytes - 1],
    "all is gone": lambda *_: b"",
}


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_between_is_repaired(work, damage, tmp_path):
    """As after a crash of the machine, of which some pages were on disk and some not."""
    run, expected = work
    lines = interrupted(run, tmp_path / "out", 0.7)
    partial = tmp_path / "out.partial"
    for _, (file, offset, nbytes, _), *_ in (lines[0], lines[len(lines) // 2], lines[-1]):
        content = (partial / file).read_bytes()
        if len(content) >= offset + nbytes:
            (partial / file).write_bytes(DAMAGES[damage](content, offset, nbytes))
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


def test_files_that_are_gone_are_written_again(work, tmp_path):
    run, expected = work
    for file in {place[0] for _, *places in interrupted(run, tmp_path / "out", 0.9) for place in places}:
        (tmp_path / "out.partial" / file).unlink()
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


@pytest.mark.parametrize("journal", ["cut off", "of other places", "of another purpose", "damaged", "empty", "binary"])
def test_a_journal_that_is_not_ours_or_damaged_is_not_believed(work, journal, tmp_path):
    run, expected = work
    interrupted(run, tmp_path / "out", 0.9)
    path = tmp_path / "out.partial/.journal"
    content = path.read_text()
    lines = content.splitlines(keepends=True)
    # As another version of this program might have cut the files.
    moved = [json.loads(line) for line in lines[1:]]
    path.write_bytes(
        {
            "cut off": content[:-7],
            "of other places": lines[0]
            + "".join(json.dumps([a[0], *b[1:]]) + "\n" for a, b in zip(moved, moved[::-1], strict=True)),
            "of another purpose": '{"from": "elsewhere"}\n' + "".join(lines[1:]),
            "damaged": "".join(lines[:2]) + '["half\n' + "".join(lines[2:]),
            "empty": "",
            "binary": "\udcff\udcfe" * 30,
        }[journal].encode(errors="surrogateescape")
    )
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


def test_files_of_another_purpose_do_not_stay(source, tmp_path):
    convert(source, tmp_path / "out")
    expected = everything_in(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", TP2_PP2, progress=interrupt_after(1.0))
    assert (tmp_path / "out.partial/release/__3_0.distcp").exists()
    convert(source, tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected
    assert not (tmp_path / "out/release/__3_0.distcp").exists()


def test_another_source_is_another_purpose(tmp_path):
    tensors = random_tensors(MODELS["qwen3"])
    folder = write_model(tmp_path / "hf", MODELS["qwen3"], tensors)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", progress=interrupt_after(1.0))
    changed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    write_model(tmp_path / "changed", MODELS["qwen3"], changed)
    (tmp_path / "changed/model.safetensors").replace(folder / "model.safetensors")
    convert(folder, tmp_path / "out")
    export(tmp_path / "out", tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(folder)


@pytest.mark.parametrize("error", [ValueError("of the progress"), OSError(13, "of the progress"), MemoryError()])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_thread_ends_all_of_them_and_leaves_nothing(work, error, workers, tmp_path):
    run, _ = work
    threads = threading.active_count()

    def progress(done: int, total: int) -> None:
        if done > total // 3:
            raise error

    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        run(tmp_path / "out", workers=workers, progress=progress)
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_was_away_is_waited_for(work, tmp_path):
    run, expected = work

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(UserError, match="when that has passed, the same command goes on where it was"):
        run(tmp_path / "out", progress=progress)
    assert noted(tmp_path / "out.partial")
    run(tmp_path / "out")
    assert everything_in(tmp_path / "out") == expected


def test_progress_counts_every_byte_once(work, tmp_path):
    run, _ = work
    calls: list[tuple[int, int]] = []
    run(tmp_path / "out", workers=3, progress=lambda done, total: calls.append((done, total)))
    done = [each for each, _ in calls]
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]}
    interrupted(run, tmp_path / "again/out")
    calls.clear()
    run(tmp_path / "again/out", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (done[-1], done[-1])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 512 KiB."""
    (tmp_path / "disk").mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path / "disk"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a file system needs more rights")
    yield tmp_path / "disk"
    subprocess.run(["umount", tmp_path / "disk"], check=True)


def test_a_full_disk_is_said_before_anything_is_written(work, small_disk):
    run, _ = work
    (small_disk / "mine").write_bytes(bytes(496 * 1024))
    with pytest.raises(UserError, match=r"has room for [\d,]+ bytes, and [\d,]+ are needed; free some space"):
        run(small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["mine"]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_disk_that_fills_up_leaves_nothing(work, share, small_disk):
    run, _ = work

    def progress(done: int, total: int) -> None:
        if done >= share * total and not (small_disk / "mine").exists():
            with (small_disk / "mine").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass

    with pytest.raises(UserError, match=r"has no room \(No space left on device\); free some space"):
        run(small_disk / "out", progress=progress)
    assert [path.name for path in small_disk.iterdir()] == ["mine"]
    (small_disk / "mine").unlink()
    run(small_disk / "out")


def test_a_disk_that_is_read_only_is_one_sentence(work, small_disk):
    run, _ = work
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=r"cannot be read or written \(Read-only file system\)"):
        run(small_disk / "out")
    assert list(small_disk.iterdir()) == []
