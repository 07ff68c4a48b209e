"""Programs that run in the environment which has SGLang, as on a CPU."""

import os
import subprocess
from pathlib import Path

from megarl.rollout.sglang.installation import installation


def output_of(program: str, *arguments: Path) -> str:
    """The output of a program of this folder, which has to succeed."""
    python, paths = installation()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [python, Path(__file__).with_name(program), *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
