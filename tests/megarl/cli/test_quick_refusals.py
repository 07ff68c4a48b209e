"""A typo costs a moment: it is found before torch is loaded, which takes seconds."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pyarrow", "ray", "numpy")
LONG = "x" * 300
REFUSED = {
    "export --megatron nope --out out": "nope is not a folder; give the path of a torch_dist checkpoint",
    "convert --hf nope --out out": "nope is not a folder; give the path of a model in HuggingFace form",
    "inspect nope": "nope is not a folder; give one with a checkpoint",
    "diff . nope": "nope is not a folder; give one with a checkpoint",
    "verify nope": "nope is not a folder; give one with a checkpoint",
    "plan --model nope": "--model nope is no config.json, no folder with one and none of deepseek_v3",
    "plan --model qwen3_8b --gpu 8": "megarl plan has no option --gpu; did you mean --gpus?",
    "chat --model nope": "--model=nope is not a HuggingFace folder: it has no config.json",
    "eval --model nope --files nope.parquet": "--model=nope is not a HuggingFace folder: it has no config.json",
    "eval --model model --files nope.parquet": "--files: there is no file nope.parquet",
    f"eval --model model --files nope.parquet --output-dir {LONG}": "is longer than a file system takes",
    "train --config-name quickstart model.path=nope": "model.path=nope is not a HuggingFace folder",
    "train --config-name quickstart model.path=model data.train_files=[nope.parquet]": "there is no file nope.parquet",
    f"train --config-name quickstart model.path=model output_dir={LONG}": "is longer than a file system takes",
    "config --from-verl nope.sh": "there is no file nope.sh",
    "config --from-verl nope.yaml": "there is no file nope.yaml",
    "config --from-verl model": "model is a folder: name a script",
    "config --from-verl model/config.json": "model/config.json has no settings of verl",
    "config --from-slime nope.sh": "there is no file nope.sh",
    "config --from-slime model": "model is a folder: name a script",
    "train --config-name quickstart --megatron-args model": "model is a folder: name a script",
    "train --config-name quickstart --megatron-args nope.yaml": "there is no file nope.yaml",
    "quickstart --engine vlm": "--engine=vlm is not an engine: use one of",
    "quickstart --steps 0": "--steps 0 is too small; give at least 1",
    f"quickstart --output-dir {LONG}": "is longer than a file system takes: choose a shorter name",
}
"""Command line -> a part of the sentence that it is refused by."""


@pytest.mark.parametrize("words", REFUSED)
def test_a_typo_is_found_before_torch_is_loaded(words, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = f"""import sys
from megarl.cli.main import main
code = main({words.split()!r})
print(code, *(name for name in {HEAVY!r} if name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert REFUSED[words] in done.stderr.splitlines()[-1]
    assert done.stdout.split() == ["2"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
