import os
import sys
from pathlib import Path

import pytest
from observation import RunFailed, Window, observe

# Steps burn CPU time, the first and the last much more than the others, and rest, so that a late look changes nothing.
_PROGRAM = """
import json, pathlib, sys, time
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
        end = time.process_time() + (1.0 if step in (1, steps) else 0.2)
        while time.process_time() < end:
            pass
        line = {"step": step, "reward/mean": step, "seconds/rollout": float(step), "seconds/step": 2.0}
        file.write(json.dumps({**line, "throughput/tokens_per_s": 50.0}) + "\\n")
        file.flush()
        time.sleep(0.3)
"""


@pytest.mark.long
def test_only_the_steps_of_the_window_are_measured(tmp_path: Path) -> None:
    window = Window(warm_up=1, steps=5)
    output = tmp_path / "run"
    command = [sys.executable, "-c", _PROGRAM, str(output), str(window.run_steps)]
    seen = observe(command, dict(os.environ), output, window)
    # With the first or the last step they would be 0.36 or more.
    assert 0.15 < seen.cpu_seconds_per_step < 0.3
    assert seen.reward_mean == 4.0
    assert seen.stage_seconds == {"rollout": 4.0, "step": 2.0}
    assert seen.tokens_per_step == 100.0


def test_a_run_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RunFailed, match="no such model"):
        observe(command, dict(os.environ), tmp_path / "run", Window(warm_up=1, steps=1))
