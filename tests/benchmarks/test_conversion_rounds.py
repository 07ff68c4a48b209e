import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conversion.observe import Observation, RunFailed, observe
from conversion.programs import Phase, deal, disk_programs, folder_bytes
from conversion.rounds import Run, run_once
from conversion.tables import CP, summarise

MB = 1_000_000


def test_memory_is_what_no_file_backs_of_all_processes(tmp_path: Path) -> None:
    mapped = tmp_path / "mapped"
    mapped.write_bytes(bytes(300 * MB))
    program = (
        "import json, mmap, subprocess, sys, time\n"
        f"file = open({str(mapped)!r}, 'rb')\n"
        "seen = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        f"pages = sum(seen[::{mmap.PAGESIZE}])\n"
        "held = b'x' * 60_000_000\n"
        "child = \"held = b'x' * 100_000_000; import time; time.sleep(1.5)\"\n"
        "subprocess.run([sys.executable, '-c', child])\n"
        "print('a line before')\n"
        "print(json.dumps({'seconds': 1.5}))"
    )
    seen = observe([sys.executable, "-c", program], dict(os.environ))
    assert 160 * MB < seen.peak_anonymous_bytes < 200 * MB
    assert 100 * MB < seen.peak_anonymous_bytes_of_a_process < 130 * MB
    assert seen.last_line == {"seconds": 1.5}
    assert seen.seconds > 1.5


def test_cpu_seconds_are_those_of_a_run_and_its_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\n"
    program = f"import subprocess, sys\n{burn}subprocess.run([sys.executable, '-c', {burn!r}])"
    # They would be half if one of the two counted alone, and twice as many with the run before.
    for _ in range(2):
        assert 0.75 < observe([sys.executable, "-c", program], dict(os.environ)).cpu_seconds < 1.4


def test_a_run_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(RunFailed, match="no such model"):
        observe([sys.executable, "-c", "raise SystemExit('no such model')"], dict(os.environ))


def test_files_are_shared_out_by_their_size(tmp_path: Path) -> None:
    files = [tmp_path / str(size) for size in (1, 2, 3, 4, 10)]
    for file in files:
        file.write_bytes(bytes(int(file.name)))
    assert [sorted(int(file.name) for file in hand) for hand in deal(files, 2)] == [[10], [1, 2, 3, 4]]


@pytest.mark.parametrize("program", disk_programs([2]), ids=lambda program: program.name)
def test_the_disk_programs_write_as_much_as_they_read(program, tmp_path: Path) -> None:
    source = tmp_path / "a folder"
    source.mkdir()
    for number in range(3):
        (source / f"{number} of 3").write_bytes(os.urandom(2_000_000))
    run = run_once(program, 0, source, tmp_path / "the copy")
    assert run.read_bytes == run.written_bytes == 6_000_000
    assert not (tmp_path / "the copy").exists()
    assert folder_bytes(source) == 6_000_000
    assert 0 < run.phases[0].seconds <= run.observation.seconds


def test_speeds_are_divided_by_those_of_cp_in_the_same_round() -> None:
    observation = Observation(1.0, 1.0, 0, 0, {})

    def run(program: str, round_number: int, seconds: float, written: int) -> Run:
        return Run(program, round_number, [Phase(program, seconds)], 100, written, observation)

    # The disk becomes slower and slower, by which ours is hit less.
    runs = [run(CP, 0, 1.0, 100), run("ours", 0, 4.0, 50), run("ours", 1, 2.0, 50), run(CP, 1, 2.0, 100)]
    runs += [run(CP, 2, 4.0, 100), run("ours", 2, 4.0, 50)]
    ours = summarise(runs)[1]
    assert ours.written_over_cp == 0.5
    assert ours.read_over_cp == 1.0


def test_peers_that_are_left_out_are_not_silently_so() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "convert.py"
    ended = subprocess.run([sys.executable, script, "--only", "mbridge"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--shape narrow" in ended.stderr
