"""The main job on GPUs, end to end: warm-up, training with direct refits, export, and the check in a fresh vLLM."""

import json
import subprocess
import sys

import pytest
from gpus import needs_gpus, needs_package

pytestmark = [pytest.mark.cuda, needs_gpus(1), needs_package("vllm"), pytest.mark.timeout(1800)]


def quickstart(folder, *options):
    command = [sys.executable, "-m", "megarl.cli.main", "quickstart", "--output-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    logs = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(folder.rglob("logs/*.log")))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_the_quickstart_runs_to_its_end_and_its_export_is_the_trained_model(model, tmp_path):
    summary = quickstart(tmp_path / model, "--model", model, "--steps", "20")
    assert summary["export_confirmed"]
    assert summary["accuracy_last"] > summary["accuracy_first"] - 0.05
    assert summary["refit_path"].startswith("direct in")
