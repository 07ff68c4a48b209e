"""Files of a checkpoint that would run code: none of it runs."""

import argparse
import io
import os
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import MODELS, content_of, contents, export
from distributed import huggingface_tensors, read_table, write_table
from refusal import assert_refused
from torch.distributed.checkpoint import metadata as dcp

from converters.formats.torch_dist import TorchDistCheckpoint

NORM = "decoder.final_layernorm.weight"


class Call:
    """Unpickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def attacks(marker: Path) -> dict[str, Any]:
    code = f"open({str(marker)!r}, 'w').close()"
    return {
        "a shell command": Call(os.system, f"touch {marker}"),
        "a file": Call(open, str(marker), "w"),
        "code": Call(exec, code),
        "code to evaluate": Call(eval, code),
        "a folder": Call(os.mkdir, str(marker)),
        "a method that is looked up": Call(Path.touch, marker),
    }


NAMES = sorted(attacks(Path()))
CLASSES = ("planner_data", "a key", "a field of a known class", "a state", "everything")


def poisoned(table: dcp.Metadata, where: str, call: Call) -> Any:
    if where == "planner_data":
        table.planner_data = {"a": [call]}
    elif where == "a key":
        table.planner_data = {(call, 1): 2}
    elif where == "a field of a known class":
        table.planner_data = argparse.Namespace(a=call)
    elif where == "a state":
        table.storage_meta = dcp.StorageMeta()
        table.storage_meta.extra = call
    else:
        return call
    return table


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", CLASSES)
def test_no_code_of_a_table_of_contents_runs(name, where, megatron, tmp_path):
    marker = tmp_path / "marker"
    content = pickle.dumps(poisoned(read_table(megatron / "release"), where, attacks(marker)[name]))
    pickle.loads(content)
    assert marker.exists(), "the attack works on those who unpickle"
    (marker.rmdir if marker.is_dir() else marker.unlink)()
    (megatron / "release/.metadata").write_bytes(content)
    if where == "everything":
        assert_refused(export, megatron, tmp_path / "hf", "is not the table of contents")
    else:
        export(megatron, tmp_path / "hf")
        assert content_of(tmp_path / "hf") == contents(huggingface_tensors(MODELS["qwen3_moe"]))
    assert not marker.exists()


@pytest.mark.parametrize("name", NAMES)
def test_no_code_of_a_common_state_runs(name, megatron, tmp_path):
    marker, path = tmp_path / "marker", megatron / "release/common.pt"
    path.unlink()
    torch.save({"args": attacks(marker)[name], "iteration": 7, "tensor": torch.ones(2)}, path)
    torch.load(path, weights_only=False)
    assert marker.exists(), "the attack works on those who unpickle"
    (marker.rmdir if marker.is_dir() else marker.unlink)()
    assert TorchDistCheckpoint(megatron).common["iteration"] == 7
    assert not marker.exists()


@pytest.mark.parametrize("name", NAMES)
def test_no_code_of_a_chunk_runs(name, megatron, tmp_path):
    marker = tmp_path / "marker"
    (index,) = [index for index in read_table(megatron / "release").storage_data if index.fqn == NORM]
    table = read_table(megatron / "release")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(attacks(marker)[name]))
        archive.writestr("archive/data/0", bytes(32))
        archive.writestr("archive/version", "3\n")
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert marker.exists(), "the attack works on those who unpickle"
    (marker.rmdir if marker.is_dir() else marker.unlink)()
    (megatron / "release/evil").write_bytes(buffer.getvalue())
    table.storage_data[index] = replace(
        table.storage_data[index], relative_path="evil", offset=0, length=len(buffer.getvalue())
    )
    write_table(megatron / "release", table)
    assert_refused(export, megatron, tmp_path / "hf", r"evil \(chunk of decoder.final_layernorm.weight at \[0\]\)")
    assert not marker.exists()


def test_no_module_that_a_file_names_is_imported(megatron, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "wicked_module.py").write_text(f"open({str(marker)!r}, 'w').close()\nname = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = b"cwicked_module\nname\n."
    (megatron / "release/.metadata").write_bytes(content)
    assert_refused(export, megatron, tmp_path / "hf", "is not the table of contents")
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the attack works on those who unpickle"
    del sys.modules["wicked_module"]
