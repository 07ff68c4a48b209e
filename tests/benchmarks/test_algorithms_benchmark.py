import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "algorithms.py"


def test_responses_too_few_for_the_groups_are_refused_at_once() -> None:
    command = [sys.executable, SCRIPT, "--responses", "512"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1], env={"PYTHONPATH": "."})
    assert ended.returncode == 2
    assert "--groups need at least 2048" in ended.stderr
